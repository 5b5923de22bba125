import pytest
import torch

from ptlf.core.batch import Batch
from ptlf.core.errors import UserError
from ptlf.methods import METHODS, Memory
from ptlf.methods.replay import LumpConfig, beta
from ptlf.run.config import from_dict
from ptlf.views import named_views

VIEW = named_views("memory", 8)[0]


def batch_of(numbers: list[int], size: int = 8) -> Batch:
    """Images and second views filled with their number."""
    values = torch.tensor(numbers)
    images = values.to(torch.uint8)[:, None, None, None].expand(-1, size, size, 3).contiguous()
    view = values.float()[:, None, None, None].expand(-1, 3, size, size)
    return Batch(images, values * 0, torch.zeros(2, len(values), 1), views=[view * 0, view])


def fill(memory: Memory, count: int, generator: torch.Generator, batch: int = 10) -> None:
    for start in range(0, count, batch):
        part = batch_of(list(range(start, min(start + batch, count))))
        memory.add(part, memory.slots(len(part), generator))


def test_reservoir_follows_the_sequential_algorithm() -> None:
    """Slots of whole batches against algorithm R, one image at a time, fed the same uniforms. Of images that claim the
    same slot the last gets it, and the others none."""
    for seed in range(20):
        memory = Memory(7, 8, 8, VIEW)
        generator, twin = (torch.Generator().manual_seed(seed) for _ in range(2))
        reservoir: dict[int, int] = {}
        for start in range(0, 120, 12):
            slots, claims = memory.slots(12, generator), {}
            for number, chance in enumerate(torch.rand(12, generator=twin, dtype=torch.float64).tolist(), start):
                slot = number if number < 7 else int(chance * (number + 1))
                claims |= {slot: number} if slot < 7 else {}
            places = {number: slot for slot, number in claims.items()}
            assert slots.tolist() == [places.get(number, 7) for number in range(start, start + 12)], seed
            memory.add(batch_of(list(range(start, start + 12))), slots)
            reservoir |= claims
        kept = [reservoir[slot] for slot in range(7)]
        assert memory.images[:7, 0, 0, 0].tolist() == memory.views[:7, 0, 0, 0].tolist() == kept, seed
        assert len(memory) == 7 and int(memory.seen) == memory.count == 120


def test_picks_are_without_replacement_and_repeat_only_when_short() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = Memory(16, 8, 8, VIEW)
    assert memory.draw(4, generator)["picks"].tolist() == [16] * 4  # empty: the spare row
    fill(memory, 6, generator, batch=6)
    for batch in (6, 12):
        picks = memory.draw(batch, generator)["picks"].tolist()
        assert sorted(picks) == sorted([*range(6)] * (batch // 6))


def test_state_carries_the_reservoir_on() -> None:
    first, second = (Memory(20, 8, 8, VIEW) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    fill(first, 50, generator)
    second.load_state_dict(first.state_dict())
    assert second.count == 50
    holder = torch.nn.ModuleDict({"memory": Memory(20, 8, 8, VIEW)})
    holder.load_state_dict({f"memory.{name}": value for name, value in first.state_dict().items()})
    assert holder["memory"].count == 50
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    fill(first, 50, generator)
    fill(second, 50, twin)
    assert torch.equal(first.images[:20], second.images[:20])


def test_the_past_is_what_was_held_when_the_task_began() -> None:
    memory = Memory(20, 8, 8, VIEW)
    fill(memory, 12, torch.Generator().manual_seed(0), batch=6)
    memory.begin_task()
    fill(memory, 200, torch.Generator().manual_seed(1))
    assert memory.past()[:, 0, 0, 0].tolist() == list(range(12))
    assert memory.images[: len(memory)][:, 0, 0, 0].tolist() != memory.past()[:, 0, 0, 0].tolist()


def lump(memory: Memory, **settings):
    return METHODS["lump"](LumpConfig(**settings), None, memory, torch.Generator().manual_seed(0))


def test_first_step_and_unmixed_first_task_pass_views_through() -> None:
    for method in (lump(Memory(8, 8, 8, VIEW)), lump(Memory(8, 8, 8, VIEW), mix_first_task=False)):
        batch = batch_of(list(range(8)))
        batch.views, batch.draws = list(torch.randn(2, 8, 3, 8, 8)), method.draw(8)
        assert torch.equal(torch.stack(method.mix(batch)), torch.stack(batch.views))
    fill(method.memory, 8, torch.Generator(), batch=8)
    method.begin_task(0, None, 10)
    assert method.draw(8)["lam"] == 1
    method.begin_task(1, None, 10)
    assert method.draw(8)["lam"] != 1


def test_rehearsal_leaves_no_trace() -> None:
    method = lump(Memory(8, 8, 8, VIEW))
    with method.rehearsal():
        inside = method.draw(4)
    assert method.memory.count == 0
    assert all(torch.equal(value, inside[name]) for name, value in method.draw(4).items())


def test_beta_has_the_right_moments_and_an_alpha_whose_draws_underflow_is_refused() -> None:
    assert {float(beta(0.001, torch.Generator().manual_seed(seed))) for seed in range(50)} & {0.5}
    with pytest.raises(UserError, match=r"^method\.alpha must be at least 0\.01, not 0\.002$"):
        from_dict({"method": {"name": "lump", "alpha": 0.002}})
    generator = torch.Generator().manual_seed(0)
    for alpha in (0.01, 0.1, 0.4, 2.0):
        draws = torch.stack([beta(alpha, generator) for _ in range(4000)]).double()
        assert abs(draws.mean() - 0.5) < 0.03
        assert abs(draws.var() - 1 / (4 * (2 * alpha + 1))) < 0.012
        assert ((draws >= 0) & (draws <= 1) & (draws != 0.5)).all()
