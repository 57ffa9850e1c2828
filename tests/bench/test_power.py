"""Energy from counters: differences, wraps, and machines that tell nothing."""

from __future__ import annotations

import pytest

from slipstream.bench.power import Counter, EnergyMeter, Reading


@pytest.fixture
def powercap(tmp_path):
    for zone, name, used in (("intel-rapl:0", "package-0", 5_000_000), ("intel-rapl:1", "package-1", 1_000_000)):
        (tmp_path / zone).mkdir()
        for file, text in (("name", name), ("energy_uj", used), ("max_energy_range_uj", 10_000_000)):
            (tmp_path / zone / file).write_text(f"{text}\n")
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of package 0, which counts there already
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999\n")
    return tmp_path


def test_joules_of_all_packages_together(powercap):
    meter = EnergyMeter(powercap)
    ours = tuple(s for s in meter.sources if s.startswith("rapl"))
    assert ours == ("rapl package-0", "rapl package-1")
    before = meter.read()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("7500000")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("500000")  # began again at 0
    assert before.joules_until(meter.read()) == pytest.approx(2.5 + 9.5)


def test_what_cannot_be_read_is_none(powercap, tmp_path):
    meter = EnergyMeter(powercap)
    before = meter.read()
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert before.joules_until(meter.read()) is None
    assert Reading({}).joules_until(Reading({})) is None
    assert not [s for s in EnergyMeter(tmp_path / "none").sources if s.startswith("rapl")]


def test_a_counter_without_a_known_end_does_not_wrap():
    assert Counter(3.0).until(Counter(5.0)) == 2.0
    assert Counter(8.0, 10.0).until(Counter(1.0, 10.0)) == 3.0
