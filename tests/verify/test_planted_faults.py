"""Faults that a server of SmolLM2 may have, found by `slipstream verify`, and servers without one."""

import pytest

from slipstream.config import EngineArgs
from slipstream.verify.checks import Verification
from slipstream.verify.reference import Reference
from slipstream.verify.report import document
from slipstream.verify.seen import VerifyPlan
from tests.verify.planted import FAULTS, served_with, write_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    write_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def references(dense):
    made = {}

    def get(name):
        if name not in made:
            args = EngineArgs(model=str(dense / name), dtype="bfloat16", device="cpu")
            made[name] = Reference.load(args, context=1600)
        return made[name]

    return get


def found_in(dense, references, fault):
    with served_with(dense, fault) as served:
        reference = references("base" if fault is None else fault.against)
        findings = Verification(served, reference, VerifyPlan(max_kl=0.001)).run()
    print(*findings, sep="\n")
    return findings


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_cause(dense, references, name):
    findings = found_in(dense, references, FAULTS[name])
    assert any(FAULTS[name].words in f.why for f in findings if f.outcome == "fault")
    assert document({}, findings)["verdict"] == "faulty"


def test_a_server_without_a_fault_is_sound(dense, references):
    findings = found_in(dense, references, None)
    assert not [f for f in findings if f.outcome == "fault"]
