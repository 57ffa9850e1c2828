"""What is known of a candidate before it is measured: a roofline of its decode step and its prompts. *Estimated.*

A better predictor has the same form, `Callable[[Candidate], Prediction]`; `search` corrects whatever it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.bench.load import ClosedLoop, parse_arrivals
from slipstream.bench.step_cost import decode_step
from slipstream.compress.recipe import Quantize, read_recipe
from slipstream.errors import ConfigError
from slipstream.optimize.search import Candidate, Prediction, Prior
from slipstream.optimize.traffic import Traffic
from slipstream.spec.description import ModelDescription
from slipstream.spec.scheme import SCHEMES

STEP_S = 2e-4
"""What a step takes beside its products: planning, sampling, sending."""

KL_OF_BITS = {16: 0.0, 8: 0.002, 6: 0.008, 5: 0.02, 4: 0.05, 3: 0.3, 2: 1.5}
"""Nats that rounding weights to so many bits costs, in the order of magnitude; the first measurement takes its place."""

KL_OF_CACHE = 0.005
"""Likewise, of keys and values of 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine does at most: bytes read a second, and operations a second in 16 bits and in 8."""

    read: float
    multiply: float
    multiply8: float


def roofline_prior(description: ModelDescription, traffic: Traffic, rates: Rates) -> Prior:
    """The function that `search.Search` takes."""
    arrivals = parse_arrivals(traffic.arrivals)
    users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else len(traffic.lengths)
    n_in, n_out = traffic.mean_input, traffic.mean_output

    def predict(candidate: Candidate) -> Prediction:
        settings = dict(candidate.settings)
        batch = max(1, min(users, settings.get("max_num_seqs") or users))
        bits, scheme = bits_of(candidate.compression)
        kv_bytes = 1 if settings.get("kv_cache_dtype") in ("int8", "fp8") else 2
        cost = decode_step(description, batch_size=batch, context=n_in + n_out / 2, scheme=scheme, kv_bytes=kv_bytes)
        eight = scheme is not None and SCHEMES[scheme].inputs is not None
        multiply = rates.multiply8 if eight else rates.multiply
        step_s = STEP_S + max(cost.num_bytes / rates.read, cost.num_flops / multiply)
        prompt_s = n_in * cost.num_flops / batch / multiply
        wall_s = batch * prompt_s + n_out * step_s  # of a batch of requests that come together
        kl = KL_OF_BITS[bits] + (KL_OF_CACHE if kv_bytes == 1 else 0.0)
        return Prediction(throughput=batch * n_out / wall_s, tpot_s=wall_s / n_out, kl=kl)

    return predict


def bits_of(compression: str) -> tuple[int, str | None]:
    """Bits of a weight, and the scheme of `SCHEMES` that costs about the same; names as `run.check_compressions` takes them."""
    if compression == "none":
        return 16, None
    if compression in SCHEMES:
        return SCHEMES[compression].weight_bits, compression
    recipe = read_recipe(compression.removeprefix("recipe:"))
    quantize = recipe.one(Quantize)
    if quantize is None:
        return 16, None
    bits = quantize.bits if isinstance(quantize.bits, int) else round(quantize.bits.average)
    nearest = min(KL_OF_BITS, key=lambda known: abs(known - bits))
    return nearest, "int8" if bits > 5 else "int4"


def rates_of_cpu() -> Rates:
    """Measured here. ConfigError without the C++ kernels."""
    from slipstream.kernels.native import ThreadPool
    from slipstream.plan.hardware import available_cores
    from slipstream.worker.roofline import measure_ceilings

    try:
        found = measure_ceilings(ThreadPool(available_cores()))
    except OSError as error:
        raise ConfigError(f"this CPU's ceilings can't be measured: {error}", field="device") from None
    return Rates(read=found.read, multiply=found.bfloat16, multiply8=found.int8)


RATES_OF_GPU = {
    "H200": Rates(read=4.2e12, multiply=7e14, multiply8=1.4e15),
    "H100": Rates(read=2.9e12, multiply=6.5e14, multiply8=1.3e15),
    "A100": Rates(read=1.6e12, multiply=2.6e14, multiply8=5.2e14),
}
"""Of their data sheets, less what is never reached; other GPUs are taken for the last. Only ratios between candidates count."""


def rates_of(device_name: str, *, on_gpu: bool) -> Rates:
    if not on_gpu:
        return rates_of_cpu()
    return next((rates for name, rates in RATES_OF_GPU.items() if name in device_name), RATES_OF_GPU["A100"])
