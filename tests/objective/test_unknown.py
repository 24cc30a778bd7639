"""What an objective must not do while its sizes are fixed: an error names it. Each call is fine without the mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detgraph.models.counted import UnknownOperation
from detgraph.models.fixed_sizes import Constants, FixedSizes

CPU = torch.device("cpu")
CONSTANT = torch.arange(3.0)


class Things:
    """Tensors to do something with: a plain one, a mask, rows of it, and rows of another mask of as many places."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.empty(6, 4, device=CPU).uniform_(0.1, 2, generator=draw)
        self.total = torch.ones((), device=CPU, dtype=torch.long)
        self.mask = torch.zeros(6, 4, dtype=torch.bool, device=CPU)
        self.mask[1::2] = True
        self.wide = torch.ones(6, 4, 3, device=CPU)
        self.weight = torch.ones(3, device=CPU, requires_grad=True)

    def count(self) -> Things:
        self.at = self.mask.nonzero(as_tuple=True)
        self.rows = self.wide[self.at]
        self.values = self.x[self.at]
        self.others = self.wide[self.mask.logical_not().nonzero(as_tuple=True)]
        return self


def write(target: torch.Tensor, at: object, value: object) -> None:
    target[at] = value


def write_twice(t: Things) -> None:
    target = torch.zeros(6, 4, device=CPU)
    target[t.at] = t.values
    target[t.at] = t.values


READS = {
    "nonzero": lambda t: t.mask.nonzero(),
    "torch.nonzero": lambda t: torch.nonzero(t.mask),
    "where": lambda t: torch.where(t.mask),
    "argwhere": lambda t: t.mask.argwhere(),
    "x[mask]": lambda t: t.x[t.mask],
    "x[byte mask]": lambda t: t.x[t.mask.byte()],
    "x[mask] = number": lambda t: write(t.x, t.mask, 0.0),
    "x[mask] = tensor": lambda t: write(t.x, t.mask, t.x[:3].reshape(-1).clone()),
    "x[list of bool]": lambda t: t.x[[True, False] * 3],
    "masked_select": lambda t: t.x.masked_select(t.mask),
    "unique": lambda t: t.x.unique(),
    "unique_consecutive": lambda t: t.x.unique_consecutive(),
    "bincount": lambda t: t.x.view(-1).long().bincount(),
    "repeat_interleave": lambda t: t.x.repeat_interleave(t.x[:, 0].long(), 0),
    "item": lambda t: t.total.item(),
    "tolist": lambda t: t.x.tolist(),
    "numpy": lambda t: t.x.numpy(),
    "cpu": lambda t: t.x.cpu(),
    "repr": lambda t: repr(t.x),
    "format": lambda t: f"{t.total}",
    "bool": lambda t: bool(t.total),
    "int": lambda t: int(t.total),
    "float": lambda t: float(t.total),
    "index": lambda t: [1, 2][t.total],
    "if any": lambda t: 1 if t.mask.any() else 0,
    "x[number]": lambda t: t.x[t.total],
    "x[:number]": lambda t: t.x[: t.total],
    "zeros of a size": lambda t: torch.zeros(t.total, device=CPU),
    "expand": lambda t: t.x[:1].expand(t.total, 4),
    "equal": lambda t: torch.equal(t.x, t.x),
    "allclose": lambda t: torch.allclose(t.x, t.x),
    "tensor of tensors": lambda t: torch.tensor([t.total, t.total], device=CPU),
    "rand": lambda t: torch.rand(3, device=CPU),
    "dropout": lambda t: F.dropout(t.x),
    "bernoulli": lambda t: t.x.clamp(0, 1).bernoulli(),
    "host data": lambda t: t.x[0, :3] * torch.arange(3),
    "host data alone": lambda t: torch.arange(3) + 1,
    "host data kept on the host": lambda t: torch.arange(3).to(torch.float32),
}
ROWS = {
    "sum over rows": lambda t: t.rows.sum(0),
    "sum, the dimension going": lambda t: t.rows.sum(-1),
    "torch.sum": lambda t: torch.sum(t.rows),
    "sum of a type": lambda t: t.rows.sum(dtype=torch.float64),
    "mean": lambda t: t.rows.mean(),
    "mean over rows": lambda t: t.rows.mean(0, keepdim=True),
    "max": lambda t: t.rows.max(),
    "amax": lambda t: t.rows.amax(0),
    "any": lambda t: t.rows.bool().any(),
    "std": lambda t: t.rows.std(),
    "matmul": lambda t: t.rows @ t.weight,
    "transposed": lambda t: t.rows.T,
    "sort": lambda t: t.rows.sort(0),
    "cumsum": lambda t: t.rows.cumsum(0),
    "softmax over rows": lambda t: F.log_softmax(t.rows, dim=0),
    "gather over rows": lambda t: t.rows.gather(0, t.rows.long()),
    "chunk of rows": lambda t: t.rows.chunk(2, 0),
    "sum of parts of rows": lambda t: t.rows.view(-1).sum(),
    "view with a number": lambda t: t.rows.view(2, -1),
    "view across rows": lambda t: t.rows.view(-1, 9),
    "reshape": lambda t: t.rows.reshape(-1, 3),
    "flatten": lambda t: t.rows.flatten(),
    "cat": lambda t: torch.cat((t.rows, t.rows)),
    "stack": lambda t: torch.stack((t.rows, t.rows)),
    "a row": lambda t: t.rows[0],
    "some rows": lambda t: t.rows[:2],
    "a column": lambda t: t.rows[..., 0],
    "each row": lambda t: list(t.rows),
    "their number": lambda t: t.rows.shape[0],
    "their number, unpacked": lambda t: [*t.rows.shape],
    "their number, compared": lambda t: t.rows.shape == t.wide.shape,
    "their number, by size": lambda t: t.rows.size(0),
    "their number, by len": lambda t: len(t.rows),
    "numel": lambda t: t.rows.numel(),
    "zeros of their shape": lambda t: torch.zeros(t.rows.shape, device=CPU),
    "zeros like them": lambda t: torch.zeros_like(t.rows),
    "with other rows": lambda t: t.rows + t.others,
    "with rows of other dimensions": lambda t: t.values * t.values.view(-1, 1),
    "with a tensor that is no row": lambda t: t.rows + t.x[0].sum().expand(12, 3),
    "with a gradient over rows": lambda t: t.rows * t.weight,
    "in place into others": lambda t: t.wide[0, 0].clone().expand(12, 3).clone().clamp_(t.rows),
    "in place": lambda t: t.rows.add_(1),
    "logarithm": lambda t: t.rows.log(),
    "a power of rows": lambda t: t.values.pow(t.values),
    "loss with a reduction": lambda t: F.l1_loss(t.rows, t.rows),
    "places of rows": lambda t: t.rows.nonzero(as_tuple=True),
    "rows as a mask": lambda t: t.rows.bool(),
    "read": lambda t: t.rows.tolist(),
    "indexed among others": lambda t: t.wide[:, t.at[1]],
    "indexed with others": lambda t: t.wide[t.at[0], t.total],
    "some places, with a gradient": lambda t: t.wide.requires_grad_()[t.at[:1]],
    "computed places, with a gradient": lambda t: t.x.requires_grad_()[t.at[0], t.at[1].clamp(0, 2)],
    "written among what is not zero": lambda t: write(torch.ones(6, 4, device=CPU), t.at, t.values),
    "written twice": write_twice,
    "written as a number": lambda t: write(torch.zeros(6, 4, device=CPU), t.at, 1.0),
    "written in another shape": lambda t: write(torch.zeros(7, 4, device=CPU), t.at, t.values),
    "written at other places": lambda t: write(torch.zeros(6, 4, device=CPU), (t.at[0], t.at[1].clamp(0, 2)), t.values),
    "written, with a gradient": lambda t: write(
        torch.zeros(6, 4, device=CPU), t.at, t.wide.requires_grad_()[t.at].sum(-1, keepdim=True).squeeze(-1)
    ),
}


@pytest.fixture(params=["learning", "fixed"])
def mode(request) -> FixedSizes:
    """Return a mode that learns, or one with capacities after another has learned."""
    constants = Constants()
    learning = FixedSizes(CPU, constants)
    if request.param == "learning":
        return learning
    return FixedSizes(CPU, constants, [14, 14])


@pytest.mark.parametrize("name", READS)
def test_reads_of_the_device(mode, name):
    READS[name](Things())
    things = Things()
    with mode, pytest.raises(UnknownOperation):
        READS[name](things)


@pytest.mark.parametrize("name", ROWS)
def test_operations_on_counted_rows(mode, name):
    ROWS[name](Things().count())
    things = Things()
    with mode:
        things.count()
        with pytest.raises(UnknownOperation):
            ROWS[name](things)
        things.values.sum()  # reads the counts, which otherwise is an error, too


def test_an_error_names_the_operation():
    things = Things()
    with pytest.raises(UnknownOperation, match=r"^cumsum\(\) of counted rows$"), FixedSizes(CPU, Constants()):
        things.count().rows.cumsum(0)
    with pytest.raises(UnknownOperation, match="^aten::_unique2 depends on the data"), FixedSizes(CPU, Constants()):
        things.x.unique()


def test_counts_that_nothing_reads():
    """A number of rows beyond its capacity would go unseen."""
    things = Things()
    with pytest.raises(UnknownOperation, match="places of mask 1: counted"), FixedSizes(CPU, Constants(), [5]):
        things.x[things.mask.nonzero(as_tuple=True)]


def test_a_mask_that_was_not_learned():
    things = Things()
    with pytest.raises(UnknownOperation, match="more often than learned"), FixedSizes(CPU, Constants(), [12]):
        things.count()


def test_host_data_of_another_value():
    constants = Constants()
    with FixedSizes(CPU, constants):
        torch.tensor([1, 2], device=CPU)
    with FixedSizes(CPU, constants, [1]):
        torch.tensor([1, 2], device=CPU)
    with pytest.raises(UnknownOperation, match=r"\[1, 3\]"), FixedSizes(CPU, constants, [1]):
        torch.tensor([1, 3], device=CPU)


def test_host_data_that_was_not_learned():
    with pytest.raises(UnknownOperation, match="learned"), FixedSizes(CPU, Constants(), [1]):
        torch.tensor([1, 3], device=CPU)


@pytest.mark.parametrize(
    "made", [lambda: torch.tensor([1, 2], device=CPU), lambda: torch.arange(2).type_as(CONSTANT)], ids=["", "by type"]
)
def test_host_data_that_is_written_to(made):
    with pytest.raises(UnknownOperation, match="written to"), FixedSizes(CPU, Constants()):
        made().add_(1)
