"""What is expected of a candidate before it is measured: the engine's own scheduler over the traffic, on a virtual clock
(`simulate.simulator`), with steps as they were measured here, or estimated. `search` corrects whatever it is given."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

from slipstream.bench.adapters import Parallel, parse_parallel
from slipstream.bench.load import parse_arrivals
from slipstream.compress.recipe import Quantize, read_recipe
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
"""Nats that rounding a large model's weights to so many bits costs, in the order of magnitude; the first measurement takes its
place."""

LARGE_MODEL = 8e9
"""Its parameters. A smaller one loses more, by the root of how much smaller it is: of SmolLM2-135M 8 bits take 0.010 to 0.030
nats, 4 bits 0.35 to 0.39 (benchmarks/results: fidelity, compression_recipes)."""

CALIBRATED = 0.4
"""The share of it that a recipe's calibration leaves, with 4 bits or fewer: 0.39 became 0.13 to 0.19 there."""

KL_OF_CACHE = 0.005
"""Likewise, of keys and values of 8 bits, whatever the model's size."""


def guessed_kl(compression: str, cache_dtype: str, num_parameters: float = LARGE_MODEL) -> float:
    """Nats, before anything was measured."""
    bits, _ = bits_of(compression)
    kl = KL_OF_BITS[bits] * math.sqrt(LARGE_MODEL / num_parameters)
    if bits <= 4 and compression not in SCHEMES:
        kl *= CALIBRATED
    return kl + (KL_OF_CACHE if cache_dtype != "auto" else 0.0)


def simulated_prior(
    base: EngineArgs, description: ModelDescription, traffic: RecordedTraffic, hardware: Hardware
) -> Prior:
    """The function that `search.Search` takes. `base` holds what all candidates share. Drafts are not simulated.

    GPUs that share layers out are the plan's. Those that share them by stages are as several engines, each with its part of
    the memory that weights leave and of the sequences: so many steps are under way, and each passes all layers. Ranks on a CPU
    share its cores and its memory, and are expected to do what one process does."""
    workload, arrivals = (
        of_lengths(traffic.source, traffic.lengths),
        parse_arrivals(traffic.arrivals),
    )
    load = workload.traffic(arrivals, len(traffic.lengths), seed=traffic.seed)
    # Of random weights no divergence is measured: `run` takes the guess of a large model for it.
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
        except (ConfigError, OutOfMemoryError):  # what it is, its measurement says
            return NOTHING
        if found.num_failed or not found.output_throughput:  # requests that the engine would refuse
            return NOTHING
        kl = guessed_kl(candidate.compression, given.get("kv_cache_dtype", "auto"), num_parameters)
        tpot_s = found.tpot_s.p99 if found.tpot_s is not None else NOTHING.tpot_s
        return Prediction(throughput=found.output_throughput, tpot_s=tpot_s, kl=kl)

    return predict


def bits_of(compression: str) -> tuple[int, str | None]:
    """Bits of a weight, and the scheme of `SCHEMES` that costs about the same; names as `run.check_compressions` takes them."""
    if compression == "none":
        return 16, None
    if compression in SCHEMES:
        return SCHEMES[compression].weight_bits, compression
    recipe = read_recipe(compression.removeprefix("recipe:"))
    quantize = recipe.one(Quantize)
    if recipe.one(Sparsify) is not None or recipe.one(PruneSettings) is not None:
        return 3, "int8"  # half the weights: as fast as 8 bits, and it costs like 3
    if quantize is None:
        return 16, None
    bits = quantize.bits if isinstance(quantize.bits, int) else round(quantize.bits.average)
    nearest = min(KL_OF_BITS, key=lambda known: abs(known - bits))
    return nearest, "int8" if bits > 5 else "int4"
