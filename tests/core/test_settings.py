from functools import partial

import pytest

from ptlf.core.errors import UserError
from ptlf.core.reading import load_yaml
from ptlf.core.settings import as_dict, describe, merge, nested, parse, parse_overrides
from ptlf.evaluation import PROBES
from ptlf.methods.replay import LumpConfig
from ptlf.run.config import Config, from_dict, to_yaml
from ptlf.run.recipes import recipe

merged = partial(merge, Config)


def test_a_configuration_survives_yaml() -> None:
    import yaml

    config = from_dict(merge(Config, recipe("digits/simsiam/lump"), nested("method.alpha", 0.7)))
    again = from_dict(yaml.safe_load(to_yaml(config)))
    assert again == config
    assert isinstance(again.method, LumpConfig)


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("epochs", 2, "unknown key 'epochs'; did you mean 'training.epochs'?"),
        ("training.epoch", 2, "unknown key 'training.epoch'; did you mean 'training.epochs'?"),
        ("training", 3, "training must hold keys and values, not 3"),
        ("training.epochs", 0, "training.epochs must be at least 1, not 0"),
        ("training.epochs", "two", "training.epochs must be a whole number, not 'two'"),
        ("training.epochs", 1.5, "training.epochs must be a whole number, not 1.5"),
        ("training.epochs", True, "training.epochs must be a whole number, not True"),
        ("training.lr", 0, "training.lr must be more than 0, not 0.0"),
        ("training.lr", "fast", "training.lr must be a number, not 'fast'"),
        ("training.lr", float("nan"), "training.lr must be a finite number, not nan"),
        ("training.schedule", "cosin", "unknown value for training.schedule: 'cosin'; did you mean 'cosine'?"),
        ("training.channels_last", "maybe", "training.channels_last must be true or false or null, not 'maybe'"),
        ("freezing.final", 1.2, "freezing.final must be at most 1, not 1.2"),
        ("method.name", "fintune", "unknown method 'fintune'; did you mean 'finetune'?"),
        ("method.alpha", 0.4, "unknown key 'method.alpha'"),
        ("stream.groups", 3, "stream.groups must be a list of lists or null, not 3"),
        ("probes.knn_class.k", 0, "probes.knn_class.k must be at least 1, not 0"),
        ("probes.knn.k", 0, "unknown probe 'knn'; did you mean 'knn_task'?"),
        ("probes", 3, "probes must hold keys and values, not 3"),
        ("freezing.policy", "corelation", "unknown freezing policy 'corelation'; did you mean 'correlation'?"),
    ],
)
def test_wrong_values_are_named(dotted: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        from_dict(nested(dotted, value))
    assert str(error.value).startswith(message)


def test_text_reads_as_the_setting_needs_it() -> None:
    values = {"2": 2, "1e-3": "1e-3", "true": True, "null": None, "[1, a]": [1, "a"], "a: b: c": "a: b: c"}
    assert {text: parse(text) for text in values} == values
    assert from_dict(nested("training.lr", "1e-3")).training.lr == 1e-3  # YAML takes 1e-3 for text
    for word in ("010", "12:30", "1e-3", "1_000", "1.50", "no", "2020-01-02", "7"):
        for values in (parse_overrides(Config, ["--stream.pack", word]), {"stream": load_yaml(f"pack: {word}")}):
            assert from_dict(values).stream.pack == word
    groups = parse_overrides(Config, ["--stream.groups", "[[010, 011], [8, 0x1]]"])
    assert from_dict(groups).stream.groups == [["010", "011"], [8, "0x1"]]
    for word in ("010", "0o10", "12:30", "1_000", "1e3"):
        with pytest.raises(UserError, match=f"seed must be a whole number, not '{word}'"):
            from_dict(parse_overrides(Config, ["--seed", word]))
    words = ["--seed", "+5", "--training.lr", "1.0e-05", "--training.channels_last", "Yes"]
    config = from_dict(parse_overrides(Config, words))
    assert (config.seed, config.training.lr, config.training.channels_last) == (5, 1e-5, True)
    assert from_dict(nested("stream.groups", [[0, "bird"], [2]])).stream.groups == [[0, "bird"], [2]]


def test_merging_reaches_sections_within_sections_and_renames_them() -> None:
    base = {"method": {"name": "lump", "alpha": 1}, "seed": 1}
    assert merged(base, {"method": {"alpha": 2}}) == {"method": {"name": "lump", "alpha": 2}, "seed": 1}
    assert merged(base, {"method": {"name": "finetune"}})["method"] == {"name": "finetune"}
    assert base["method"] == {"name": "lump", "alpha": 1}
    assert merged({"method": {"alpha": 3}}, {"method": {"name": "lump"}})["method"] == {"alpha": 3, "name": "lump"}
    views = {"views": {"name": "lump", "size": 224}}  # which belongs to no particular views
    assert merged(views, {"views": {"name": "cassle-moco"}})["views"] == {"name": "cassle-moco", "size": 224}
    base = {"training": {"lr": 1, "optimizer": {"name": "lars", "momentum": 0.5, "eta": 1}}}
    kept = merged(base, {"training": {"optimizer": {"eta": 2}}})
    assert kept == {"training": {"lr": 1, "optimizer": {"name": "lars", "momentum": 0.5, "eta": 2}}}
    renamed = merged(base, {"training": {"optimizer": {"name": "sgd", "momentum": 0.1}}})
    assert renamed == {"training": {"lr": 1, "optimizer": {"name": "sgd", "momentum": 0.1}}}
    probes = merged({"probes": {"linear": {"lr": 1}}}, {"probes": {"linear": {"epochs": 2}, "knn_task": {"k": 3}}})
    assert probes == {"probes": {"linear": {"lr": 1, "epochs": 2}, "knn_task": {"k": 3}}}


def test_plain_text_is_the_name_of_a_section() -> None:
    chosen = {"objective": "simclr", "freezing": {"policy": "cost_aware"}, "training": {"optimizer": "adamw"}}
    config = from_dict(chosen)
    assert (config.objective.name, config.objective.temperature) == ("simclr", 0.5)
    assert (config.freezing.policy.name, config.freezing.policy.sharpness) == ("cost_aware", 8.0)
    assert (config.training.optimizer.name, config.training.optimizer.beta2) == ("adamw", 0.999)
    text, mapping = {"method": "lump"}, {"method": {"name": "lump", "alpha": 2}}
    assert merged(text, {"method": {"alpha": 2}}) == mapping
    assert merged(mapping, text) == mapping
    assert merged(mapping, {"method": "der"}) == {"method": {"name": "der"}}
    assert merged({"freezing": {"policy": "correlation"}}, {"freezing": {"policy": {"name": "cost_aware"}}}) == {
        "freezing": {"policy": {"name": "cost_aware"}}
    }
    words = ["--method", "lump", "--method.alpha", "2", "--freezing.policy=ascending"]
    assert parse_overrides(Config, words) == {**mapping, "freezing": {"policy": "ascending"}}


def test_every_probe_has_its_settings_and_every_key_a_help_text() -> None:
    config = from_dict({"probes": {"linear": {"enabled": True}}})
    assert list(config.probes) == list(PROBES)
    assert [name for name, probe in config.probes.items() if probe.enabled] == ["knn_task", "knn_class", "linear"]
    assert list(as_dict(config)["probes"]["knn_class"]) == ["enabled", "k", "temperature"]
    rows = describe(Config)
    assert {"training.epochs", "method.alpha", "objective.redundancy", "probes.knn_class.k"} <= {r[0] for r in rows}
    assert [key for key, _, about in rows if not about] == []
