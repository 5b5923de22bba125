import numpy as np
import pytest
import torch

from ptlf.core.errors import UserError
from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.evaluation.probes import knn_predict
from ptlf.methods.pnn import Columns
from ptlf.run.loop import Run


def columns(tasks: int = 3, width: float = 1.0) -> Columns:
    torch.manual_seed(0)
    return Columns(ResNet(BasicBlock, (1, 1, 1), width=4), width, tasks)


def test_lateral_connections_by_hand() -> None:
    made, images = columns(), torch.randn(4, 3, 16, 16)
    made.begin(2)
    made.eval()
    with torch.no_grad():
        maps = []
        for index, column in enumerate(made.columns):
            x, given = column.stem(images), []
            for stage in range(3):
                if stage > 0 and index > 0:
                    lateral = made.laterals[index][stage - 1]
                    old = torch.cat([maps[older][stage - 1] for older in range(index)], dim=1)
                    mixed = torch.einsum("oi,bihw->bohw", lateral.conv.weight[:, :, 0, 0], old * lateral.scale)
                    x = x + (mixed + lateral.conv.bias[:, None, None]).clamp_min(0)
                x = column.stages[stage](x)
                given.append(x)
            maps.append(given)
        expected = torch.cat([given[-1].mean((2, 3)) for given in maps], dim=1)
        torch.testing.assert_close(made(images), expected)
        assert expected.shape == (4, 48)
        assert made.feature_slice(1) == slice(16, 32)
        made.begin(1)
        assert made(images).shape == (4, 32)
        assert made.feature_slice(2) == slice(16, 32)


@pytest.mark.parametrize("objective", ["byol", "mocov2plus"])
def test_a_moving_average_starts_each_task_as_the_encoder_and_keeps_its_old_columns(tiny, objective: str) -> None:
    run = Run(tiny(f"digits/{objective}/finetune", method__name="pnn", encoder__name="conftest:tiny_resnet"))
    teacher, begin_task, begun = run.model.objective.teacher.encoder, run.method.begin_task, []

    def begin(index, model, steps) -> None:
        begin_task(index, model, steps)
        begun.append(index)
        mine, copied = model.encoder.state_dict(), teacher.state_dict()
        assert all(torch.equal(copied[key], value) for key, value in mine.items())
        assert teacher.current == index and not any(p.requires_grad for p in teacher.parameters())

    run.method.begin_task = begin
    run.train()
    assert len(begun) > 1
    mine, copied = run.model.encoder.state_dict(), teacher.state_dict()
    old = [key for key in mine for index in range(begun[-1]) if key.split(".")[1:2] == [str(index)]]
    newest = [key for key in mine if key.startswith(f"columns.{begun[-1]}.")]
    for key in old:  # but for rounding: the average of two equal weights
        torch.testing.assert_close(copied[key], mine[key], rtol=1e-5, atol=1e-7)
    assert any("running_mean" in key for key in old)
    assert any(not torch.equal(copied[key], mine[key]) for key in newest)


def test_old_columns_stay_to_the_bit_and_new_ones_train(tiny) -> None:
    run = Run(tiny("digits/simsiam/finetune", method__name="pnn", encoder__name="conftest:tiny_resnet"))
    snapshots = []
    end_task = run.method.end_task

    def spy(index, model) -> None:
        end_task(index, model)
        model.encoder.eval()
        with torch.no_grad():
            images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
            vector = model.encoder(images)[:, model.encoder.feature_slice(0)]
        snapshots.append(({k: v.clone() for k, v in model.encoder.state_dict().items()}, vector))

    run.method.end_task = spy
    start = {k: v.clone() for k, v in run.model.encoder.state_dict().items()}
    results = run.train()
    (first, vector), (second, again) = snapshots
    old = [key for key in first if key.startswith(("columns.0.", "laterals.0."))]
    new = [key for key in first if key.startswith(("columns.1.", "laterals.1.")) and key.endswith("weight")]
    assert all(torch.equal(first[key], second[key]) for key in old)
    assert torch.equal(vector, again)
    assert all(torch.equal(first[key], start[key]) for key in new)
    assert all(not torch.equal(first[key], second[key]) for key in new)
    matrix = results["probes"]["knn_task"]["matrix"]
    assert results["probes"]["knn_task"]["forgetting"] is not None
    assert matrix[1][1] is not None


def test_exams_see_their_own_column_or_all(tiny) -> None:
    own = {"method__name": "pnn", "encoder__name": "conftest:tiny_resnet", "probes__knn_task__k": 3}
    run = Run(tiny("digits/simsiam/finetune", **own))
    results = run.train()
    encoder, prober = run.model.encoder.eval(), run.components.prober
    with torch.no_grad():
        banks = [prober.features(encoder, split.bank_images, split.bank) for split in run.stream.eval_splits]
        tests = [prober.features(encoder, split.test_images, split.test) for split in run.stream.eval_splits]
    width = encoder.feature_dim
    for task in range(2):
        own = slice(task * width, (task + 1) * width)
        (bank, labels), (queries, wanted) = banks[task], tests[task]
        predicted = knn_predict(bank[:, own], labels, queries[:, own], k=3, temperature=0.1)
        assert results["probes"]["knn_task"]["matrix"][1][task] == 100 * float((predicted == wanted).double().mean())
    everything = torch.cat([b for b, _ in banks]), torch.cat([labels for _, labels in banks])
    assert everything[0].shape[1] == 2 * width
    right = [knn_predict(*everything, queries, k=20, temperature=0.1) == wanted for queries, wanted in tests]
    expected = 100 * np.mean([float(one.double().mean()) for one in right])
    assert results["probes"]["knn_class"]["accuracy"] == pytest.approx(expected)


def test_state_rebuilds_the_columns_in_use() -> None:
    made, fresh = columns(), columns()
    made.begin(2)
    fresh.load_state_dict(made.state_dict())
    assert fresh.current == 2
    assert not any(p.requires_grad for p in fresh.columns[1].parameters())
    assert all(p.requires_grad for p in fresh.columns[2].parameters())
    assert not fresh.train().columns[1].training
    assert fresh.columns[2].training


def test_width_is_a_setting_and_other_networks_are_refused(tiny) -> None:
    assert columns(width=1.5).feature_dim == 24
    with pytest.raises(UserError, match="columns of a residual network, not of Sequential"):
        Run(tiny("digits/simsiam/finetune", method__name="pnn"))
    with pytest.raises(UserError, match="chooses itself what trains"):
        Run(tiny("digits/simsiam/ptlf", method__name="pnn", encoder__name="conftest:tiny_resnet"))
