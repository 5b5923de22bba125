from __future__ import annotations

import pytest

from ptlf.core.errors import UserError
from ptlf.core.settings import as_dict, describe, merge, nested, parse
from ptlf.methods.lump import LumpConfig
from ptlf.run.config import Config, from_dict, to_yaml
from ptlf.run.recipes import name_of, names, recipe


def test_every_recipe_is_a_complete_configuration() -> None:
    for name in names():
        config = from_dict(recipe(name))
        assert config.recipe == name
        assert config.stream.name == name.split("/")[0]
        assert config.objective.name == name.split("/")[1]


def test_every_row_of_the_paper_has_a_recipe() -> None:
    rows = ("finetune", "pnn", "si", "der", "cassle", "lump", "ptlf", "multitask")
    streams = ("split-cifar10", "split-cifar100", "split-tinyimagenet")
    wanted = {f"{stream}/{o}/{row}" for stream in streams for o in ("simsiam", "barlow_twins") for row in rows}
    wanted |= {f"imagenet100/{o}/{row}" for o in ("barlow_twins", "mocov2plus") for row in ("cassle", "cassle-ptlf")}
    wanted |= {f"{stream}/supervised/{row}" for stream in streams for row in ("finetune", "layerwise")}
    assert wanted <= set(names())
    barlow, moco = (from_dict(recipe(f"imagenet100/{o}/cassle-ptlf")) for o in ("barlow_twins", "mocov2plus"))
    assert (barlow.training.optimizer, barlow.training.warmup, barlow.views.name) == ("lars", 10, "cassle-barlow")
    assert (moco.training.optimizer, moco.training.warmup, moco.views.name) == ("sgd", 0, "cassle-moco")
    assert barlow.views.size == moco.views.size == 224
    assert (moco.method.name, moco.freezing.policy, moco.evaluation.linear.enabled) == ("cassle", "correlation", True)
    assert from_dict(recipe("split-cifar100/simsiam/pnn")).method.width == 12 / 64


def test_a_configuration_survives_yaml() -> None:
    import yaml

    config = from_dict(merge(recipe("digits/simsiam/lump"), nested("method.alpha", 0.7)))
    again = from_dict(yaml.safe_load(to_yaml(config)))
    assert again == config
    assert isinstance(again.method, LumpConfig)


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("training.epoch", 2, "unknown key 'training.epoch'; did you mean 'training.epochs'?"),
        ("trainng", {}, "unknown key 'trainng'; did you mean 'training'?"),
        ("training", 3, "training must hold keys and values, not 3"),
        ("training.epochs", 0, "training.epochs must be at least 1, not 0"),
        ("training.epochs", -3, "training.epochs must be at least 1, not -3"),
        ("training.epochs", "two", "training.epochs must be a whole number, not 'two'"),
        ("training.epochs", 1.5, "training.epochs must be a whole number, not 1.5"),
        ("training.epochs", True, "training.epochs must be a whole number, not True"),
        ("training.lr", 0, "training.lr must be more than 0, not 0.0"),
        ("training.lr", "fast", "training.lr must be a number, not 'fast'"),
        ("training.lr", float("nan"), "training.lr must be a finite number, not nan"),
        ("training.batch", 1, "training.batch must be at least 2, not 1"),
        ("training.schedule", "cosin", "unknown value for training.schedule: 'cosin'; did you mean 'cosine'?"),
        ("training.channels_last", "maybe", "training.channels_last must be true or false or null, not 'maybe'"),
        ("freezing.final", 1.2, "freezing.final must be at most 1, not 1.2"),
        ("objective.name", "simsam", "unknown objective 'simsam'; did you mean 'simsiam'?"),
        ("method.name", "fintune", "unknown method 'fintune'; did you mean 'finetune'?"),
        ("method.alpha", 0.4, "unknown key 'method.alpha'"),
        ("stream.groups", 3, "stream.groups must be a list of lists or null, not 3"),
        ("evaluation.knn_class.k", 0, "evaluation.knn_class.k must be at least 1, not 0"),
        ("seed", "x", "seed must be a whole number, not 'x'"),
    ],
)
def test_wrong_values_are_named(dotted: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        from_dict(nested(dotted, value))
    assert str(error.value).startswith(message)


def test_text_reads_as_numbers_lists_and_words() -> None:
    assert [parse(t) for t in ("2", "1e-3", "true", "null", "[1, a]", "lump", "a: b: c")] == [
        2, "1e-3", True, None, [1, "a"], "lump", "a: b: c",
    ]  # fmt: skip
    assert from_dict(nested("training.lr", "1e-3")).training.lr == 1e-3  # YAML takes 1e-3 for text


def test_classes_by_number_stay_numbers() -> None:
    assert from_dict(nested("stream.groups", [[0, "bird"], [2]])).stream.groups == [[0, "bird"], [2]]


def test_merge_keeps_a_section_unless_it_is_renamed() -> None:
    base = {"method": {"name": "lump", "alpha": 1}, "seed": 1}
    assert merge(base, {"method": {"alpha": 2}}) == {"method": {"name": "lump", "alpha": 2}, "seed": 1}
    assert merge(base, {"method": {"name": "finetune"}})["method"] == {"name": "finetune"}
    assert base["method"] == {"name": "lump", "alpha": 1}
    assert merge({"method": {"alpha": 3}}, {"method": {"name": "lump"}})["method"] == {"alpha": 3, "name": "lump"}
    views = {"views": {"name": "lump", "size": 224}}
    assert merge(views, {"views": {"name": "cassle-moco"}})["views"] == {"name": "cassle-moco", "size": 224}


def test_every_key_has_a_help_text() -> None:
    rows = describe(Config)
    assert {"training.epochs", "method.alpha", "objective.redundancy", "evaluation.knn_class.k"} <= {r[0] for r in rows}
    assert [key for key, _, about in rows if not about] == []


def test_as_dict_is_plain() -> None:
    assert as_dict(from_dict({}))["training"]["epochs"] == 200


def test_a_run_is_called_what_it_is() -> None:
    def name(recipe: str, policy: str = "correlation", **sections: str) -> str:
        chosen = {"stream": "digits", "objective": "simsiam", "method": "lump", **sections}
        settings = {section: {"name": value} for section, value in chosen.items()}
        return name_of({"recipe": recipe, **settings, "freezing": {"policy": policy}})

    assert name("digits/simsiam/ptlf") == "digits/simsiam/ptlf"
    assert name("digits/simsiam/ptlf", "none") == "digits/simsiam/ptlf, no freezing"
    assert name("digits/simsiam/ptlf", "random") == "digits/simsiam/ptlf + random freezing"
    assert name("digits/simsiam/ptlf", "none", objective="byol", method="der") == "digits/byol/der"
    assert name("digits/simsiam/ptlf", stream="folder") == "folder/simsiam/ptlf"
    assert name("", "none") == "digits/simsiam/lump"
    assert name("") == "digits/simsiam/lump + correlation freezing"
