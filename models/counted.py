"""Rows whose number depends on the data: what may be done with them, and how, at a fixed capacity.

A mask's true places are such rows. At a capacity they are held like this: the first ``count`` rows are the true places
in their order, all rows beyond repeat the first. What is done to each row by itself is then done to all. Rows beyond
never leave: a sum leaves them out, a write puts zeros on places that are false in the mask, and so zero before, and a
gradient puts zeros there. Those places are different ones, since many zeros for one place cost milliseconds.

Whatever mixes rows, or could, is not known here, and an error names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .torch_private import ADDED_KEYWORDS


class UnknownOperation(RuntimeError):
    """The objective does what cannot be recorded with equal bytes; the message names the operation."""


class CapacityExceeded(RuntimeError):
    """A batch needs more places than there are.

    ``needed`` maps the name of a size to the number that was met: of the first one that is too small, and of those
    before it. Sizes after it were computed from too little, and say nothing.
    """

    def __init__(self, needed: dict[str, int], name: str, capacity: int) -> None:
        super().__init__(f"{needed[name]} {name}, but places for {capacity}")
        self.needed = needed


class Counted:
    """One data-dependent number of rows: the true places of ``mask``, of which the first ``capacity`` fit.

    ``places`` are the indices to read at and ``targets`` those to write at, one tensor for each dimension; they differ
    beyond the count. ``number`` is the count on the host, known after it was read.
    """

    def __init__(self, name: str, mask: Tensor, capacity: int) -> None:
        self.name = name
        self.shape = mask.shape
        self.capacity = min(capacity, mask.numel())
        self.number: int | None = None
        size, device = mask.numel(), mask.device
        upto = mask.reshape(-1).cumsum(0, dtype=torch.int32)
        self.count = upto[-1].long()  # of its own, or all of ``upto`` would live on
        row = torch.arange(1, self.capacity + 1, dtype=torch.int32, device=device)
        self.valid = row <= self.count
        place = torch.searchsorted(upto, torch.where(self.valid, row, 1)).clamp_(max=size - 1)
        false_upto = torch.arange(1, size + 1, dtype=torch.int32, device=device) - upto
        false_row = torch.where(self.valid, 1, row - self.count.int())
        target = torch.where(self.valid, place, torch.searchsorted(false_upto, false_row).clamp_(max=size - 1))
        self.places, self.targets = (_unravel(flat, mask.shape) for flat in (place, target))

    def only_valid(self, rows: Tensor) -> Tensor:
        """Return ``rows`` with zeros beyond the count."""
        return torch.where(self.valid.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


class Met(Counted):
    """The rows as upstream has them: all of them, and none beyond. What a first pass learns with."""

    def __init__(self, name: str, mask: Tensor) -> None:
        self.name = name
        self.shape = mask.shape
        self.places = self.targets = mask.nonzero(as_tuple=True)
        self.capacity = self.number = self.places[0].numel()

    def only_valid(self, rows: Tensor) -> Tensor:
        return rows


class Gather(torch.autograd.Function):
    """``source[places]``, whose gradient is zero beyond the count and goes to places of its own there."""

    @staticmethod
    def forward(ctx, source: Tensor, rows: Counted) -> Tensor:
        ctx.rows, ctx.shape = rows, source.shape
        return source[rows.places]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.new_zeros(ctx.shape)
        return whole.index_put_(ctx.rows.targets, ctx.rows.only_valid(gradient), accumulate=True), None


class Sum(torch.autograd.Function):
    """The sum of rows, computed elsewhere. Rows beyond the count get a gradient, too; where they come from drops it."""

    @staticmethod
    def forward(ctx, rows: Tensor, total: Tensor) -> Tensor:
        ctx.shape = rows.shape
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.expand(ctx.shape), None


class CountedShape(tuple):
    """The shape of counted rows. How many they are cannot be read from it; it can be handed to ``view`` as a whole."""

    tag: Tag

    def __getitem__(self, at):
        known = range(len(self))[at]
        if 0 in (known if isinstance(known, range) else (known,)):
            self.refuse()
        return super().__getitem__(at)

    def refuse(self, *args) -> None:
        raise UnknownOperation("the number of counted rows is read from their shape")

    __iter__ = __eq__ = __ne__ = __contains__ = __add__ = __mul__ = __rmul__ = refuse
    __hash__ = tuple.__hash__

    def whole(self) -> tuple[int, ...]:
        return tuple(tuple.__iter__(self))


class Tag:
    """What marks a tensor as counted: whose rows it has, and how many rows it has for each of those."""

    def __init__(self, rows: Counted, factor: int = 1) -> None:
        self.rows, self.factor = rows, factor


Tags = Callable[[object], "Tag | None"]

# Each row by itself, the same arithmetic for every place.
ELEMENTWISE = {
    *(getattr(Tensor, name) for name in ("add", "sub", "mul", "div", "neg", "minimum", "maximum", "clamp", "clamp_")),
    *(getattr(Tensor, f"__{name}__") for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg")),
    *(getattr(Tensor, name) for name in ("atan", "long", "float", "detach", "pow", "__pow__")),
    F.l1_loss,
}
IN_PLACE = {Tensor.clamp_}
OF_THE_KIND = {  # says nothing about the number of rows
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")),
    Tensor.dim,
}
POWERS = {Tensor.pow, Tensor.__pow__}
SIMPLE_POWERS = (0.5, 1, 2)  # computed by products and roots; others go through a library's function


def row_by_row(func: Callable, args: tuple, kwargs: dict, tags: Tags) -> Tag | None:
    """Return the mark of the result of a call with counted rows; raises ``UnknownOperation`` if rows could mix."""
    if func in OF_THE_KIND:
        return None
    tag = tags(args[0]) if args else None
    if func in ELEMENTWISE:
        return _elementwise(func, args, kwargs, tags)
    if tag is None or any(tags(value) for value in flat((args[1:], kwargs))) and func is not Tensor.gather:
        raise unknown(func)
    if func is Tensor.view:
        return _view(args, tag)
    if func in IN_A_ROW and IN_A_ROW[func](args, kwargs, tags):
        return tag
    raise unknown(func)


def _elementwise(func: Callable, args: tuple, kwargs: dict, tags: Tags) -> Tag:
    if func is F.l1_loss and _said(kwargs) != {"reduction": "none"}:
        raise unknown(func, "with a reduction")
    if func in POWERS and isinstance(args[1], Tensor):
        raise unknown(func, "of tensors")
    if any(isinstance(value, Tensor) for value in flat(kwargs)):
        raise unknown(func, "with tensors by keyword")
    if func in IN_PLACE and tags(args[0]) is None:
        raise unknown(func, "into rows that are not counted")
    tensors = [value for value in flat(args) if isinstance(value, Tensor)]
    found = [tags(tensor) for tensor in tensors]
    tag = next(tag for tag in found if tag is not None)
    dims = next(tensor.dim() for tensor, own in zip(tensors, found, strict=True) if own is tag)
    for tensor, own in zip(tensors, found, strict=True):
        if own is None:  # the same for every row, and without a gradient, which would be a sum over the rows
            alike = tensor.dim() < dims or tensor.dim() == dims and tensor.shape[0] == 1
            if not alike or tensor.requires_grad:
                raise unknown(func, "of counted rows and others")
        elif (own.rows, own.factor, tensor.dim()) != (tag.rows, tag.factor, dims):
            raise unknown(func, "of rows that are counted in two ways")
    return tag


def _view(args: tuple, tag: Tag) -> Tag:
    """Split rows or put them together again: each counted row stays a whole."""
    source, *sizes = args
    if len(sizes) == 1 and isinstance(sizes[0], CountedShape):
        if sizes[0].tag.rows is not tag.rows:
            raise unknown(Tensor.view, "into the shape of other rows")
        return sizes[0].tag
    if sizes[:1] != [-1] or not all(isinstance(size, int) for size in sizes):
        raise unknown(Tensor.view, "with a number of rows")
    split, rest = source.shape[1:].numel() * tag.factor, torch.Size(sizes[1:]).numel()
    if split % rest:
        raise unknown(Tensor.view, "across counted rows")
    return Tag(tag.rows, split // rest)


def _inner(args: tuple, kwargs: dict) -> bool:
    """Return whether the dimension of a call like ``chunk(4, -1)`` is not that of the rows."""
    dim = kwargs.get("dim", args[-1] if len(args) > 1 else None)
    return isinstance(dim, int) and dim % args[0].dim() != 0


def _said(kwargs: dict) -> dict:
    """Return the keywords without those that torch's functions add by themselves."""
    return {key: value for key, value in kwargs.items() if value is not None and key not in ADDED_KEYWORDS}


def _reduction(args: tuple, kwargs: dict, tags: Tags) -> bool:
    return len(args) == 2 and kwargs == {"keepdim": True} and _inner(args, kwargs)


REDUCTIONS = {Tensor.sum, Tensor.mean}
SHORT_ROW = 16  # summed in one order, however many rows there are; longer ones are not
IN_A_ROW: dict[Callable, Callable[[tuple, dict, Tags], bool]] = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    Tensor.chunk: lambda args, kwargs, tags: len(args) == 3 and not kwargs and _inner(args, kwargs),
    Tensor.squeeze: lambda args, kwargs, tags: len(args) == 2 and not kwargs and _inner(args, kwargs),
    F.log_softmax: lambda args, kwargs, tags: len(args) == 1 and set(_said(kwargs)) == {"dim"} and _inner(args, kwargs),
    Tensor.gather: lambda args, kwargs, tags: (
        not kwargs
        and args[1] % args[0].dim() != 0
        and (other := tags(args[2])) is not None
        and (other.rows, other.factor) == (tags(args[0]).rows, tags(args[0]).factor)
    ),
}


def _unravel(flat_places: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    places = []
    for size in reversed(shape):
        places.append(flat_places % size)
        flat_places = flat_places // size
    return tuple(reversed(places))


def flat(values: object) -> Iterator[object]:
    """Yield what is in nested tuples, lists and dictionaries."""
    if isinstance(values, CountedShape):
        yield values
    elif isinstance(values, dict):
        yield from flat(tuple(values.values()))
    elif isinstance(values, Iterable) and isinstance(values, tuple | list):
        for value in values:
            yield from flat(value)
    else:
        yield values


def name_of(func: Callable) -> str:
    return getattr(func, "__name__", None) or repr(func)


def unknown(func: Callable, how: str = "of counted rows") -> UnknownOperation:
    name = name_of(func)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return UnknownOperation(f"{name}() {how}")
