"""TRL's client of a vLLM server, for a server of Slipstream: an adapter of what vLLM's own library does in it.

    slipstream keys add keys.json --name trainer --role admin
    slipstream serve smollm2 --keys-file keys.json --enable-weight-updates

    client = SlipstreamClient("http://127.0.0.1:8000", api_key="sk-…")
    client.generate([[1, 2, 3]], n=4, max_tokens=16)
    client.init_communicator(device="cpu")
    with client.weight_update():
        client.update_model_params(model)

`generate`, `chat` and `get_sequence_logprobs` are TRL's own, over HTTP. Weights go through a
`WeightGroup` (gloo here; "nccl" from GPU to GPU) where TRL's goes through vLLM's, so vLLM need not be
installed. To give it to a trainer: `trainer.vllm_generation.vllm_client = client`.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlparse

import requests
from trl.generation.vllm_client import VLLMClient

from slipstream import WeightGroup


class SlipstreamClient(VLLMClient):
    """TRL's client with a key and another group for weights."""

    def __init__(self, base_url, api_key, *, backend="gloo", group_port=51216):
        self.base_url, self.group_port, self.backend = base_url, group_port, backend
        self.host = urlparse(base_url).hostname
        self.session = requests.Session()
        self.session.headers["authorization"] = f"Bearer {api_key}"
        self.communicator, self._updating_weights = None, False
        self.model = self._get(f"{base_url}/v1/models")["data"][0]["id"]

    def init_communicator(self, device="cpu"):
        is_local = self.host in ("127.0.0.1", "localhost", "::1")
        address = "127.0.0.1" if is_local else socket.gethostbyname(socket.gethostname())
        size = self.get_world_size() + 1
        info = {
            "master_address": address,
            "master_port": self.group_port,
            "world_size": size,
            "backend": self.backend,
        }
        with ThreadPoolExecutor(1) as pool:
            url = f"{self.base_url}/init_weight_transfer_engine"
            joined = pool.submit(self._post, url, json={"init_info": info})
            self.communicator = WeightGroup(
                address, self.group_port, 0, size, backend=self.backend, device=device
            )
            joined.result()

    def update_named_params(self, metadata, named_params):
        names, dtypes, shapes = (list(field) for field in zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        if not self._updating_weights:
            self._start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            url = f"{self.base_url}/update_weights"
            taken = pool.submit(self._post, url, json={"update_info": info})
            for _, tensor in named_params:
                self.communicator.broadcast(tensor)
            taken.result()
        if not self._updating_weights:
            self._finish_weight_update()

    def close_communicator(self):
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None
