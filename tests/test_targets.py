"""Target names."""

import pytest

from remat_scan import MissingPluginError
from remat_scan._targets import EXAMPLES, check_installed, environment, parse_target


@pytest.mark.parametrize(
    ("name", "platform", "devices"),
    [
        ("cpu", "cpu", 1),
        ("cpu:8", "cpu", 8),
        ("h100", "cuda", 1),
        ("B200:8", "cuda", 8),
        ("tpu7x:2x2x1", "tpu", 8),  # two devices a chip
        ("v5p:4x4x4", "tpu", 64),
        ("v6e:2x2", "tpu", 4),
    ],
)
def test_names(name, platform, devices):
    target = parse_target(name)
    assert (target.platform, target.devices) == (platform, devices)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_names(name):
    assert parse_target(name).name == name


@pytest.mark.parametrize("name", ["h10", "tpu7:2x2x1", "", "gpu", "cpu8", "v5"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=r"not known.*h100"):
        parse_target(name)


def test_the_nearest_name_is_offered():
    with pytest.raises(ValueError, match="Did you mean 'h100'"):
        parse_target("h10")


@pytest.mark.parametrize("name", ["cpu:0", "h100:x", "h100:-1", "v5p:2x2", "v6e", "tpu7x:0x1x1"])
def test_bad_sizes_say_what_is_needed(name):
    with pytest.raises(ValueError, match=r"after .*: come"):
        parse_target(name)


def test_a_missing_plugin_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPluginError, match=r"remat-scan\[tpu-aot\]"):
        check_installed(parse_target("v6e:2x2"))
    with pytest.raises(MissingPluginError, match=r"remat-scan\[gpu-aot\]"):
        check_installed(parse_target("h100"))


def test_targets_are_compiled_where_no_hardware_is_looked_for():
    assert environment(parse_target("h100"))["JAX_PLATFORMS"] == "cpu"
    assert environment(parse_target("v6e:2x2"))["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_nothing_is_compiled_for_autotuning_but_if_asked(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert environment(parse_target("h100"))["XLA_FLAGS"].split() == ["--xla_gpu_autotune_level=0"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_dump_to=x")
    flags = environment(parse_target("h100"))["XLA_FLAGS"].split()
    # The last one wins.
    assert [f for f in flags if "autotune" in f][-1] == "--xla_gpu_autotune_level=4"
    assert "--xla_dump_to=x" in flags
    assert "XLA_FLAGS" not in environment(parse_target("v6e:2x2"))


def test_the_targets_number_of_cpu_devices_wins(monkeypatch):
    count = "--xla_force_host_platform_device_count="
    monkeypatch.setenv("XLA_FLAGS", f"{count}2 --xla_dump_to=x")
    flags = environment(parse_target("cpu:4"))["XLA_FLAGS"].split()
    assert [f for f in flags if f.startswith(count)][-1] == f"{count}4"
    assert "--xla_dump_to=x" in flags
