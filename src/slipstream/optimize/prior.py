"""Predicts a candidate's speed before any measurement: the engine's own scheduler runs the traffic
on a virtual clock (`simulate.simulator`), with step times measured here or estimated. `search`
corrects the prediction."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cache

from slipstream.bench.adapters import Parallel, parse_parallel
from slipstream.bench.load import parse_arrivals
from slipstream.compress.gguf.mix import GGUF
from slipstream.compress.quantize_step import Quantize
from slipstream.compress.recipe import read_recipe
from slipstream.compress.steps import PruneSettings, Sparsify
from slipstream.config import EngineArgs
from slipstream.costs.devices import Hardware
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.optimize.candidates import NOTHING, ONE_DEVICE, Candidate, Prediction, Prior
from slipstream.optimize.traffic import RecordedTraffic
from slipstream.simulate.capacity import with_limits
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import of_lengths
from slipstream.spec.description import ModelDescription
from slipstream.spec.scheme import SCHEMES

KL_OF_BITS = {16: 0.0, 8: 0.002, 6: 0.008, 5: 0.02, 4: 0.05, 3: 0.3, 2: 1.5}
"""Assumed KL divergence in nats, to an order of magnitude, by number of bits to which a large
model's weights are quantized. The first measurement replaces it."""

LARGE_MODEL = 8e9
"""Parameters of a large model. A smaller one has a larger KL, by the square root of the ratio:
SmolLM2-135M has 0.010 to 0.030 nats with 8 bits, 0.35 to 0.39 with 4 (benchmarks/results: fidelity,
compression_recipes)."""

CALIBRATED = 0.4
"""Fraction of the KL that remains after a recipe's calibration, with 4 bits or fewer: in
measurements 0.39 became 0.13 to 0.19."""

KL_OF_CACHE = 0.005
"""Assumed KL divergence in nats of an 8-bit KV cache, for any model size."""


def guessed_kl(compression: str, cache_dtype: str, num_parameters: float = LARGE_MODEL) -> float:
    """Assumed KL divergence in nats, before any measurement."""
    bits, _ = bits_of(compression)
    kl = KL_OF_BITS[bits] * math.sqrt(LARGE_MODEL / num_parameters)
    if bits <= 4 and compression not in SCHEMES:
        kl *= CALIBRATED
    return kl + (KL_OF_CACHE if cache_dtype != "auto" else 0.0)


def simulated_prior(
    base: EngineArgs, description: ModelDescription, traffic: RecordedTraffic, hardware: Hardware
) -> Prior:
    """Make the prior for `search.Search`. `base` has the settings that all candidates share. Drafts
    are not simulated.

    GPUs with tensor parallelism are planned as such. GPUs with pipeline stages are simulated as
    several engines, because one step per stage is in flight: each step passes all layers, and has
    its fraction of the sequences and of the memory left by the weights. Ranks on a CPU share its
    cores and memory, and are predicted to be as fast as one process."""
    workload = of_lengths(traffic.source, traffic.lengths)
    arrivals = parse_arrivals(traffic.arrivals)
    load = workload.traffic(arrivals, len(traffic.lengths), seed=traffic.seed)
    # The divergence of random weights is not measured: `run` uses the assumption for a large model.
    num_parameters = (
        LARGE_MODEL if base.load_format == "dummy" else float(description.spec.num_parameters)
    )

    @cache
    def predict(candidate: Candidate) -> Prediction:
        _, scheme = bits_of(candidate.compression)
        given = {
            name: value
            for name, value in candidate.settings
            if value is not None and name != "speculative_model"
        }
        form = parse_parallel(given.pop("parallel", ONE_DEVICE), "parallel")
        if not hardware.is_gpu:
            form = Parallel()
        try:
            if form.context > 1:
                given["context_parallel_size"] = form.context
            args = dataclasses.replace(base, quantization=scheme, **given)
            every = dataclasses.replace(
                hardware, memory_bytes=hardware.memory_bytes * form.pipeline
            )
            engine = plan_engine(args, description, every, num_gpus=form.tensor).simulated
            if form.pipeline > 1:
                seqs = math.ceil(engine.scheduling.max_num_seqs / form.pipeline)
                engine = with_limits(engine, max_num_seqs=seqs)
                engine = dataclasses.replace(engine, num_blocks=engine.num_blocks // form.pipeline)
            found = simulate(engine, load, num_replicas=form.pipeline).summary
        except (ConfigError, OutOfMemoryError):  # the measurement will report the reason
            return NOTHING
        if found.num_failed or not found.output_throughput:  # the engine would refuse requests
            return NOTHING
        kl = guessed_kl(candidate.compression, given.get("kv_cache_dtype", "auto"), num_parameters)
        tpot_s = found.tpot_s.p99 if found.tpot_s is not None else NOTHING.tpot_s
        return Prediction(throughput=found.output_throughput, tpot_s=tpot_s, kl=kl)

    return predict


def bits_of(compression: str) -> tuple[int, str | None]:
    """(bits per weight, scheme in `SCHEMES` of about the same speed). Names are those of
    `run.check_compressions`."""
    if compression == "none":
        return 16, None
    if compression in SCHEMES:
        return SCHEMES[compression].weight_bits, compression
    recipe = read_recipe(compression.removeprefix("recipe:"))
    quantize = recipe.one(Quantize)
    if recipe.one(Sparsify) is not None or recipe.one(PruneSettings) is not None:
        return 3, "int8"  # half of the weights remain: as fast as 8 bits, with the KL of 3
    blocks = recipe.one(GGUF)
    if blocks is not None and blocks.name != "F16":
        bits = int(blocks.bits or re.findall(r"\d", blocks.name)[0])
    elif quantize is None:
        return 16, None
    else:
        bits = quantize.bits if isinstance(quantize.bits, int) else round(quantize.bits.average)
    nearest = min(KL_OF_BITS, key=lambda known: abs(known - bits))
    return nearest, "int8" if bits > 5 else "int4"
