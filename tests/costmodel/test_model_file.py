"""model.yaml, shipped models and the workload: what may be written, and what each mistake says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distplan.costmodel.architecture import schema
from distplan.costmodel.graph import parameters
from distplan.costmodel.hf_config import load_json, read_config
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Moe, Precision
from distplan.costmodel.model_file import ModelFile, load_model, shipped_models
from distplan.costmodel.workload import default, for_optimizer, precision, precision_names, precision_source, workload
from distplan.hardware.errors import DistplanError, DocumentError, UnknownNameError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
SMALL = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 1000, "max_seq_len": 512}
Load = Callable[..., ModelFile]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loader(text: str = "", **words: Any) -> ModelFile:
        path = tmp_path / "model.yaml"
        lines = [f"{key}: {json.dumps(value)}" for key, value in {**SMALL, **words}.items() if value is not ...]
        path.write_text("\n".join([*lines, text]) + "\n")
        return load_model(path)

    return loader


def kinds_without_names(model: Model) -> list[LayerKind]:
    return [replace(model.kinds[name], name="") for name in model.pattern]


# ---------------------------------------------------------------- shipped models and examples

SAME = {
    "mistral-7b": "mistral-7b-v0.1",
    **{name: name for name in shipped_models() if (CONFIGS / f"{name}.json").exists()},
}


@pytest.mark.parametrize("name", sorted(SAME))
def test_a_shipped_model_is_its_public_config(name: str) -> None:
    ours = load_model(name)
    theirs = read_config(load_json(CONFIGS / f"{SAME[name]}.json"), name).model
    assert ours.source
    # Llama 2's public copy here states half its context, and Phi-3's window is longer than its context
    longer = {"max_seq_len": theirs.max_seq_len} if name.startswith("llama-2-") else {}
    model = replace(ours.model, kinds={}, pattern=(), mtp_kind="", **longer)
    assert model == replace(theirs, kinds={}, pattern=(), mtp_kind="")
    if name != "phi-3-mini":
        assert kinds_without_names(ours.model) == kinds_without_names(theirs)


def test_every_shipped_model_is_compared_or_known_from_its_paper() -> None:
    assert set(shipped_models()) - set(SAME) == {"gpt3-175b"}
    assert len(SAME) >= 35


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load_and_train(example: Path) -> None:
    file = load_model(example)
    load = workload(file.model, file.workload, gpus=64)
    assert load.seq_len <= file.model.max_seq_len
    assert parameters(file.model, load)[0] > 1e9


def test_examples_are_the_shipped_models_of_their_name() -> None:
    for name in ("llama-3.1-70b", "gpt3-175b"):
        example = load_model(ROOT / "examples" / f"{name}.yaml").model
        assert replace(example, dropout=0.0, attention_dropout=0.0) == load_model(name).model


def test_gpt3_has_its_175_billion_parameters() -> None:
    file = load_model("gpt3-175b")
    # Brown et al. 2020, table 2.1: 175.0 B
    assert parameters(file.model, workload(file.model, {}, gpus=1))[0] == pytest.approx(175.0e9, rel=5e-3)


# ---------------------------------------------------------------- where a model comes from


def test_a_folder_with_a_config_is_a_model_and_gives_it_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model-7B"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "llama-2-7b.json").read_text())
    for given_path in (folder, folder / "config.json"):
        assert load_model(given_path).model.name == "My-Model-7B"
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(DocumentError, match=r"without a config\.json"):
        load_model(folder)


def test_a_shipped_name_in_any_case_and_a_file_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load_model("LLaMA-3.1-8B").kind == "shipped"
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert load_model("gpt2").kind == "shipped"
    Path("gpt2", "config.json").write_text((CONFIGS / "gpt2-medium.json").read_text())
    assert load_model("gpt2").model.hidden == 1024


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("lama-3.1-70b", "did you mean llama-3.1-70b"),
        ("examples/lama-3.1-70b.yaml", "did you mean llama-3.1-70b.yaml"),
        ("nowhere/config.json", "no such file"),
        ("no\0path", "is not a path"),
        ("", "no such file|folder"),
    ],
)
def test_a_missing_model_suggests_the_nearest(wrong: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(DocumentError, match=said):
        load_model(wrong)


def test_the_digest_follows_the_file(load: Load) -> None:
    first = load().digest
    assert load().digest == first
    assert load(ffn=256).digest != first


# ---------------------------------------------------------------- model.yaml


def test_six_words_are_a_llama(load: Load) -> None:
    model = load().model
    (kind,) = model.kinds.values()
    assert kind.mixer == Attention(heads=4, kv_heads=4, head_dim=16, v_head_dim=16)
    assert kind.ffn == Mlp(ffn=128, gated=True)
    assert (kind.norm, model.positions, model.tied_embedding) == ("rmsnorm", "rope", False)


def test_kinds_state_what_differs_and_the_pattern_repeats(load: Load) -> None:
    model = load("kinds: {local: , global: {window: 0}}\npattern: [local*2, global]", window=128).model
    assert model.pattern == ("local", "local", "global", "local")
    assert [k.mixer.window for k in model.kinds.values() if isinstance(k.mixer, Attention)] == [128, 0]


def test_experts_and_lone_mixers_can_be_described(load: Load) -> None:
    moe = "{experts: 8, top_k: 2, expert_ffn: 32, shared_ffn: 32}"
    model = load(f"kinds: {{a: {{ffn: 0}}, b: {{mixer: none}}, c: {moe}}}\npattern: [a, b, c]").model
    assert model.kinds["a"].ffn is None
    assert model.kinds["b"].mixer is None
    assert isinstance(model.kinds["c"].ffn, Moe)


def test_placements_are_kept_as_written(load: Load) -> None:
    model = load("placements: {layer.mlp.up.weight: {tp: Shard(ffn), dp_shard: Replicate}}").model
    assert model.placements == {"layer.mlp.up.weight": {"tp": "Shard(ffn)", "dp_shard": "Replicate"}}


@pytest.mark.parametrize(
    ("words", "text", "said", "key"),
    [
        ({"layers": 0}, "", "too small", "layers"),
        ({"layers": -3}, "", "too small", "layers"),
        ({"hidden": 10**12}, "", "too large", "hidden"),
        ({"hidden": "4k"}, "", "expected a whole number", "hidden"),
        ({"heads": 7}, "", "do not divide hidden = 64", "heads"),
        ({"kv_heads": 3}, "", "cannot share 3 key/value heads", "kv_heads"),
        ({"heads": ...}, "", "'heads' is missing", None),
        ({"ffn": ...}, "", "'ffn' is missing", None),
        ({"ffn": ..., "fnn": 128}, "", "did you mean ffn", "fnn"),
        ({"vocab": ...}, "", "'vocab' is missing", None),
        ({"hidden_size": 64}, "", "in a model.yaml it is 'hidden'", "hidden_size"),
        ({"activation": "swiglu"}, "", "is not one of silu", "activation"),
        ({"norm": "RMSNorm"}, "", "did you mean rmsnorm", "norm"),
        ({"gated": "yes"}, "", "expected true or false", "gated"),
        ({"norm_bias": True}, "", "an RMSNorm has no bias", "norm_bias"),
        ({"shared_norm": True}, "", "needs parallel", "shared_norm"),
        ({"v_head_dim": 8}, "", "needs kv_lora_rank", "v_head_dim"),
        ({"positions": "learned", "max_seq_len": 0}, "", "number of rows", "max_seq_len"),
        ({}, "kinds: {a: {}, b: {}}", "need a pattern", "kinds"),
        ({}, "kinds: {a: {}, b: {}}\npattern: [a, c]", "unknown kind 'c'", "pattern"),
        ({}, "kinds: {a: {}, b: {}}\npattern: [a]", "never names the kind 'b'", "pattern"),
        ({}, "kinds: {a: {}}\npattern: [a*5]", "names more layers than 4", "pattern"),
        ({}, "kinds: {a: {}}\npattern: [a*0]", "is not 'kind' or", "pattern"),
        ({}, "kinds: {a: {windw: 3}}", "did you mean window", "kinds.a.windw"),
        ({}, "kinds: {a: {experts: 8, top_k: 9, expert_ffn: 3}}", "between 1 and all 8", "kinds.a.top_k"),
        ({}, "kinds: {a: {mixer: none, ffn: 0}}", "does nothing", "kinds.a.ffn"),
        ({}, "placements: {w: {tp: Shard}}", "is not Shard", "placements.w.tp"),
        ({}, "placements: {w: {tpp: Replicate}}", "did you mean tp", "placements.w.tpp"),
        ({}, "workload: {seqlen: 3}", "did you mean seq_len", "workload.seqlen"),
        ({}, "workload: {seq_len: 0}", "too small", "workload.seq_len"),
        ({}, "workload: {precision: bf15}", "did you mean bf16", "workload.precision"),
        ({}, "workload: {precision: {gradients: bf61}}", "did you mean bf16", "workload.precision.gradients"),
        ({}, "workload: {optimizer: adam}", "did you mean adamw", "workload.optimizer"),
    ],
)
def test_a_mistake_names_its_key_and_what_would_be_right(
    load: Load, words: dict[str, Any], text: str, said: str, key: str | None
) -> None:
    with pytest.raises(DocumentError, match=re.escape(said)) as caught:
        load(text, **words)
    assert caught.value.key == key
    assert caught.value.file.endswith("model.yaml")
    assert caught.value.line is not None


JUNK = st.none() | st.booleans() | st.integers(-2, 10**12) | st.text(max_size=6) | st.lists(st.integers(), max_size=2)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.dictionaries(st.sampled_from([*schema("model"), *schema("layer"), "kinds", "pattern"]), JUNK))
def test_a_spoilt_model_file_is_read_or_refused(load: Load, words: dict[str, Any]) -> None:
    try:
        model = load(**words).model
    except DistplanError:
        return
    assert len(model.pattern) == (words.get("layers") or 4)


def test_the_document_explains_every_word() -> None:
    text = (ROOT / "docs" / "model.md").read_text()
    for part in ("model", "layer", "workload"):
        for word, meaning in schema(part).items():
            assert f"| `{word}` |" in text
            assert meaning.meaning in text
    assert all(f"`{name}`" in text for name in precision_names())


def test_the_examples_in_the_document_load(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "model.md").read_text(), re.S)
    assert len(blocks) >= 6
    for index, block in enumerate(blocks):
        missing = {key: value for key, value in SMALL.items() if not re.search(rf"^{key}:", block, re.M)}
        path = tmp_path / f"block{index}.yaml"
        path.write_text("\n".join(f"{key}: {value}" for key, value in missing.items()) + "\n" + block)
        assert load_model(path).model.layers


# ---------------------------------------------------------------- workload


def bytes_per_parameter(recipe: Precision) -> float:
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "": 0}
    return (
        size[recipe.parameters]
        + size[recipe.gradients]
        + size[recipe.master]
        + sum(map(size.__getitem__, recipe.moments))
    )


def test_recipes_have_the_bytes_of_their_sources() -> None:
    published = {"bf16": 18, "bf16-grads": 16, "zero-paper": 16, "fp16": 16, "fp32": 16, "bf16-sharded": 16}
    assert {name: bytes_per_parameter(precision(name)) for name in published} == published
    assert all(precision_source(name) for name in precision_names())
    with pytest.raises(UnknownNameError, match="did you mean bf16"):
        precision("bf16x")


def test_the_optimizer_decides_the_moments() -> None:
    assert for_optimizer(precision("bf16"), "sgd").moments == ("fp32",)
    assert for_optimizer(precision("bf16"), "adamw8bit").moments == ("int8", "int8")


def test_defaults_lie_under_runtime_file_and_command_line() -> None:
    model = load_model("llama-3.1-70b").model
    plain = workload(model, {}, gpus=64)
    assert (plain.seq_len, plain.global_batch, plain.precision.name, plain.optimizer) == (8192, 512, "bf16", "adamw")
    assert workload(model, {}, gpus=16384).global_batch == 2048
    assert workload(model, {}, gpus=64, fallbacks={"loss": "fused"}).loss == "fused"
    stated = {"loss": "fp32_logits", "seq_len": 4096}
    both = workload(model, stated, gpus=64, fallbacks={"loss": "fused"}, overrides={"seq_len": 2048})
    assert (both.loss, both.seq_len, both.global_batch) == ("fp32_logits", 2048, 2048)
    assert workload(load_model("gpt2").model, {}, gpus=8).seq_len == 1024
    assert default("hardware") == "dgx-h100"
    assert default("runtime") == "megatron"


def test_the_command_line_is_checked_like_a_file() -> None:
    model = load_model("gpt2").model
    for wrong, said in [({"seq_len": 0}, "too small"), ({"optimizer": "adamm"}, "did you mean adamw")]:
        with pytest.raises(DocumentError, match=f"command line.*{said}"):
            workload(model, {}, gpus=1, overrides=wrong)
    with pytest.raises(DistplanError, match="longer than gpt2's table of learned positions"):
        workload(model, {}, gpus=1, overrides={"seq_len": 2048})


def test_a_recipe_can_be_changed_in_the_file(load: Load) -> None:
    file = load("workload: {precision: {like: bf16, gradients: bf16, moments: bf16}, optimizer: sgd}")
    recipe = workload(file.model, file.workload, gpus=1).precision
    assert (recipe.gradients, recipe.master, recipe.moments) == ("bf16", "fp32", ("bf16",))
