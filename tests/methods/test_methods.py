import torch

from ptlf.run.loop import Run


def test_der_with_an_empty_memory_shows_norms_no_blank_images(tiny) -> None:
    run, seen = Run(tiny("digits/simsiam/finetune", method__name="der")), []
    run.model.encoder.register_forward_pre_hook(lambda encoder, given: seen.append(given[0]))
    run.trainer.step(run.trainer.load(torch.arange(32), torch.Generator().manual_seed(0), run.method.draw(32)))
    first, _, replayed = seen
    assert torch.equal(replayed, first)


def test_si_leaves_frozen_parameters_alone(tiny) -> None:
    """What methods compute is in tests/training/test_reference.py."""
    run = Run(tiny("digits/simsiam/finetune", method__name="si"))
    run.freezing.freezer.freeze(["0"])
    run.trainer.step(run.trainer.load(torch.arange(32), torch.Generator().manual_seed(0), {}))
    by_name = dict(zip(dict(run.model.encoder.named_parameters()), run.method.path, strict=True))
    assert not by_name["0.weight"].any()
    assert by_name["3.weight"].any()
