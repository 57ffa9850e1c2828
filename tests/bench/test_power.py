"""Energy from counters: differences, wraps, and machines that tell nothing."""

from __future__ import annotations

import pytest

from slipstream.bench import power
from slipstream.bench.power import Counter, EnergyMeter, PowerReading
from slipstream.cli.main import main
from slipstream.errors import ConfigError


@pytest.fixture
def powercap(tmp_path):
    for zone, name, used in (
        ("intel-rapl:0", "package-0", 5_000_000),
        ("intel-rapl:1", "package-1", 1_000_000),
    ):
        (tmp_path / zone).mkdir()
        for file, text in (
            ("name", name),
            ("energy_uj", used),
            ("max_energy_range_uj", 10_000_000),
        ):
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
    assert PowerReading({}).joules_until(PowerReading({})) is None
    assert not [s for s in EnergyMeter(tmp_path / "none").sources if s.startswith("rapl")]


def test_packages_and_gpus_that_are_not_in_use_do_not_count(powercap, monkeypatch):
    (powercap / "intel-rapl:1" / "name").write_text("psys\n")
    assert EnergyMeter(powercap).read().of("rapl").counters.keys() == {"rapl package-0"}, (
        "psys has the packages in it"
    )
    (powercap / "intel-rapl:1" / "name").write_text("package-1\n")
    monkeypatch.setattr(power, "packages_in_use", lambda: {"package-1"})
    meter = EnergyMeter(powercap, devices=["cpu"])
    assert (meter.counted, meter.sources) == ("rapl", ("rapl package-1",))
    asked = []
    monkeypatch.setattr(power, "_open_nvml", lambda numbers: asked.append(numbers) or (None, []))
    meter = EnergyMeter(powercap, devices=["cuda:1"])
    assert (asked, meter.sources) == ([[1]], ()), (
        "a GPU that tells no energy is not told as the CPU's"
    )


def test_the_power_of_the_cpu_beside_a_gpu_is_told_apart(powercap, monkeypatch):
    monkeypatch.setattr(power, "_open_nvml", lambda numbers: (None, []))
    meter = EnergyMeter(powercap, devices=["cuda:0"])
    before = PowerReading({"nvml 0": Counter(10.0), "rapl package-0": Counter(1.0)})
    after = PowerReading({"nvml 0": Counter(40.0), "rapl package-0": Counter(5.0)})
    energy = meter.energy(before, after, 2.0, 10)
    assert (energy.joules, energy.watts, energy.joules_per_output_token, energy.cpu_watts) == (
        30.0,
        15.0,
        3.0,
        2.0,
    )


def test_a_counter_without_a_known_end_does_not_wrap():
    assert Counter(3.0).until(Counter(5.0)) == 2.0
    assert Counter(8.0, 10.0).until(Counter(1.0, 10.0)) == 3.0


def test_energy_of_a_run_and_of_each_token(powercap):
    meter = EnergyMeter(powercap)
    before, after = PowerReading({"a": Counter(10.0)}), PowerReading({"a": Counter(40.0)})
    energy = meter.energy(before, after, 2.0, 60)
    assert (energy.joules, energy.watts, energy.joules_per_output_token) == (30.0, 15.0, 0.5)
    assert meter.energy(before, PowerReading({}), 2.0, 60) is None
    assert meter.energy(before, after, 2.0, 0).joules_per_output_token is None


def test_a_machine_that_tells_nothing_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr(EnergyMeter, "read", lambda self: PowerReading({}))
    with pytest.raises(ConfigError) as caught:
        EnergyMeter.required()
    assert caught.value.field == "energy"
    assert main(["bench", "throughput", "no-such-model", "--energy", "--json"]) == 2
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--energy", "--json"]) == 2
    assert '"field": "energy"' in capsys.readouterr().out
