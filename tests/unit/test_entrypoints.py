"""Old command lines: each flag is renamed, explained or refused, never dropped in silence."""

from __future__ import annotations

import json
import random

import pytest

from octavo.errors import UsageError
from octavo.server.args import FLAGS
from octavo.tools.old_flags import MANY_AT_ONCE, OLD_FLAGS, translate
from tests.unit.test_cli import octavo, parse

POSTED = (
    "--model M --device {device} --gpu-memory-utilization 0.88 --max-num-seqs 256 --max-num-batched-tokens 12288 "
    "--dtype float16 --paged-attention-block-size 32 --swap-space 8 --worker-use-ray --disable-log-requests "
    "--enforce-eager --trust-remote-code"
)
TODAY = {name for flags in FLAGS.values() for flag in flags for name in flag.names.split()}


def test_the_command_of_the_field_becomes_todays():
    translation = translate(POSTED.format(device="cpu").split())
    today = (
        "M --device cpu --gpu-memory-utilization 0.88 --max-num-seqs 256 --max-num-batched-tokens 12288 "
        "--dtype float16 --block-size 32 --swap-space 8"
    )
    assert " ".join(translation.argv) == today
    assert len(translation.warnings) == 5
    engine, _ = parse(*translation.argv)
    assert (engine.model, engine.block_size, engine.max_num_batched_tokens) == ("M", 32, 12288)


@pytest.mark.parametrize("module", ["octavo.entrypoints.openai.api_server", "octavo.entrypoints.api_server"])
def test_an_absent_npu_ends_with_2_and_names_what_to_use(module):
    result = octavo(*POSTED.format(device="npu").split(), module=module)
    assert result.returncode == 2
    assert "use --device cpu" in result.stderr.splitlines()[-1]
    warnings = [line for line in result.stderr.splitlines()[2:-1] if line.startswith("octavo: warning: ")]
    assert len(warnings) == len(result.stderr.splitlines()) - 3, "in one block"
    for name in ("--block-size 32", "--worker-use-ray", "--disable-log-requests", "--enforce-eager",
                 "--trust-remote-code"):  # fmt: skip
        assert len([line for line in warnings if name in line]) == 1


def test_no_old_flag_is_one_of_todays_and_renames_lead_to_todays():
    names = [flag.name for flag in OLD_FLAGS]
    assert len(names) == len(set(names))
    assert not set(names) & TODAY
    assert {flag.text for flag in OLD_FLAGS if flag.action == "rename"} <= TODAY
    assert set(MANY_AT_ONCE) <= TODAY


@pytest.mark.parametrize("flag", OLD_FLAGS, ids=lambda flag: flag.name)
def test_each_old_flag_leaves_a_trace(flag):
    """With a flag before and after it, whose values it must not swallow, spelled in each way."""
    value = str(random.randrange(2, 1 << 30))
    spelled = {"none": [[flag.name]], "bool": [[flag.name], [flag.name, "true"], [f"{flag.name}=false"]],
               "many": [[flag.name, value, value], [f"{flag.name}={value}"]],
               "one": [[flag.name, value], [f"{flag.name}={value}"], [flag.name.replace("-", "_").replace("__", "--", 1)
               if flag.name.startswith("--") else flag.name, value]]}[flag.values]  # fmt: skip
    for words in spelled:
        argv = ["--seed", "1", *words, "--port", "2", "--model", "m"]
        if flag.action == "refuse":
            with pytest.raises(UsageError, match=flag.name) as caught:
                translate(argv)
            assert flag.text in str(caught.value)
            assert value in str(caught.value) or flag.values in ("none", "bool")
            continue
        translation = translate(argv)
        kept = [flag.text, value] if flag.action == "rename" else []
        last: list[str] = []
        if flag.action == "speculation":
            is_text = flag.text in ("model", "method")
            last = ["--speculative-config", json.dumps({flag.text: value if is_text else int(value)})]
        assert translation.argv == ["m", "--seed", "1", *kept, "--port", "2", *last], words
        assert [line for line in translation.warnings if line.startswith(flag.name) and flag.text in line], words


@pytest.mark.parametrize("flag", [flag for flag in OLD_FLAGS if flag.harmless], ids=lambda flag: flag.name)
def test_a_refused_flag_with_the_value_that_holds_anyway_is_only_a_warning(flag):
    for value in flag.harmless:
        translation = translate([flag.name, value, "--model", "m"])
        assert translation.argv == ["m"]
        assert len(translation.warnings) == 1


def test_several_values_in_one_go():
    argv = translate(["--served-model-name", "a", "b", "--model", "m", "--api-key", "k1", "k2", "--port", "1"]).argv
    engine, server = parse(*argv)
    assert engine.served_model_name == ("a", "b")
    assert server.api_keys == ("k1", "k2")


@pytest.mark.parametrize("words", ["--swap-space", "--model m --block-size", "--model"])
def test_a_flag_without_its_value_is_refused(words):
    result = octavo(*words.split(), module="octavo.entrypoints.openai.api_server")
    assert result.returncode == 2
    assert "error: " in result.stderr


def test_a_model_is_needed_and_unknown_flags_are_refused():
    result = octavo("--dtype", "half", module="octavo.entrypoints.openai.api_server")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "--model is missing" in result.stderr
    result = octavo("--model", "m", "--swap-space", "8", "--frobnicate", module="octavo.entrypoints.openai.api_server")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), "no advice on how to write what cannot work"
    assert "unknown flag --frobnicate" in result.stderr


def test_keys_are_not_shown():
    result = octavo("--model", "m", "--api-key", "secret-1", "--api-key=secret-2", "--device", "npu",
                    module="octavo.entrypoints.openai.api_server")  # fmt: skip
    assert "secret" not in result.stderr
    assert "***" in result.stderr
