"""Upstream's own objective with fixed sizes, so that it can be recorded.

`FixedSizes` is a mode of torch in which the objective's unchanged code runs. It answers what depends on the data:

- the places of a mask, and what is done with them (`counted.py`);
- what has other bits when there are more rows, as a sum over them: it runs between two recorded pieces, on as many
  rows as there are;
- host data on its way to the device: made in the first pass, and the same tensor from then on;
- a device value that is read on the host to fill a tensor with: the fill reads it on the device.

All else passes, unless it would read the device on the host, have a size that depends on data, or draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .counted import (
    OF_THE_KIND,
    POWERS,
    REDUCTIONS,
    SHORT_ROW,
    SIMPLE_POWERS,
    CapacityExceeded,
    Counted,
    CountedShape,
    Gather,
    Met,
    Sum,
    Tag,
    UnknownOperation,
    flat,
    name_of,
    row_by_row,
    unknown,
)
from .host import READ_ON_HOST, Constants, Refusing
from .torch_private import version_of

Piece = Callable[[], None]

FACTORIES = {torch.arange, torch.zeros, torch.ones, torch.empty, torch.full, torch.linspace, torch.eye}
FROM_DATA = {torch.tensor, torch.as_tensor}
PLAIN = int | float | str | None | torch.dtype | torch.device | torch.layout


def places_of(mask: int) -> str:
    """Return the name of a size: how many places of a mask are true. Masks are numbered from 0 in their order."""
    return f"places of mask {mask + 1}"


class FixedSizes(TorchFunctionMode):
    """The mode in which one pass of the objective runs, on tensors of ``device``.

    Without ``capacities`` it *learns*: sizes are what they are, and are in ``counts`` afterwards; the first such pass
    makes ``constants``. With them, each data-dependent size has its capacity, in the order of ``counts``.

    ``cut(piece)`` ends the recording so far, has ``piece`` run there at each replay, and goes on recording; without it,
    pieces run at once. A piece that is the first to need a count reads all counts so far from the device, and raises
    `CapacityExceeded` where one does not fit, or `UnknownOperation` where one is negative. What has been computed until
    then must not be used. A recording has to keep ``constants``, and the pieces.

    Raises `UnknownOperation` for what it does not know.
    """

    def __init__(
        self,
        device: torch.device,
        constants: Constants,
        capacities: Sequence[int] | None = None,
        cut: Callable[[Piece], None] | None = None,
    ) -> None:
        super().__init__()
        self.counts: list[int] = []
        self._device, self._constants, self._capacities = torch.device(device), constants, capacities
        self._cut = cut or (lambda piece: piece())
        self._refusing = Refusing(self._device)
        self._tags = WeakIdKeyDictionary()
        self._host = WeakIdKeyDictionary()  # tensors that were made on the host, and how
        self._zeros = WeakIdKeyDictionary()  # tensors of zeros, and the version that is zero
        self._requests = self._nonzeros = 0
        self._as_is = False
        self._watched: list[tuple[str, Tensor, int, Counted | None]] = []
        self._read = 0  # how many of the watched sizes have been read

    def watch(self, name: str, count: Tensor, capacity: int, rows: Counted | None = None) -> None:
        """Have a number on the device, an int64 of its own, compared with its capacity when counts are read next."""
        self._watched.append((name, count, capacity, rows))

    @contextmanager
    def as_is(self) -> Iterator[None]:
        """What is done inside is neither answered nor refused."""
        self._as_is = True
        try:
            yield
        finally:
            self._as_is = False

    def __exit__(self, kind, error, trace) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._constants.check()
            if self._read < len(self._watched):
                raise UnknownOperation(f"{self._watched[-1][0]}: counted, and nothing is computed from the count")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._as_is:
            return func(*args, **kwargs)
        values = list(flat((args, kwargs)))
        if any(isinstance(value, CountedShape) for value in values) and func is not Tensor.view:
            raise unknown(func, "with the shape of counted rows")
        if any(isinstance(value, Tensor) and value in self._host for value in values):
            return self._from_host(func, args, kwargs)
        if func in READ_ON_HOST:
            raise unknown(func, "reads the device on the host")
        if func in FROM_DATA or func in FACTORIES and kwargs.get("device") is None:
            return self._made_on_host(func, args, kwargs)
        if func is Tensor.nonzero:
            return self._nonzero(args, kwargs)
        if any(self._tag(value) for value in values):
            return self._of_counted(func, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[1], list):
            return self._call(func, (args[0], self._index(args[1])), {})
        if func is Tensor.new_full and isinstance(args[2], Tensor):
            return self._filled(*args, **kwargs)
        result = self._call(func, args, kwargs)
        if func is torch.zeros:
            self._zeros[result] = version_of(result)
        return result

    def _call(self, func: Callable, args: tuple, kwargs: dict) -> object:
        """Run an operation. The refusing mode is on only here, so that a cut finds the caller's modes uppermost."""
        with self._refusing:
            return func(*args, **kwargs)

    def _tag(self, value: object) -> Tag | None:
        return self._tags.get(value) if isinstance(value, Tensor) else None

    # Host data

    def _made_on_host(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        if not all(isinstance(value, PLAIN) for value in flat((args, kwargs))):
            raise unknown(func, "of what is no number")
        key = name_of(func), repr(args), repr(kwargs)
        tensor = self._constant(key, lambda: func(*args, **kwargs))
        if kwargs.get("device") is None:
            self._host[tensor] = key
        return tensor

    def _from_host(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """Put host data on the device, which is all that may be done with it."""
        if func in OF_THE_KIND:
            return func(*args, **kwargs)
        source, *others = args
        by_type = func is Tensor.type_as and others[0] not in self._host
        if not (by_type or func is Tensor.to and self._names_the_device(others, kwargs)) or source not in self._host:
            raise unknown(func, "on the host")
        how = (others[0].dtype, others[0].device) if by_type else (others, kwargs)
        return self._constant((name_of(func), self._host[source], repr(how)), lambda: func(*args, **kwargs).clone())

    def _names_the_device(self, args: list, kwargs: dict) -> bool:
        kinds = [torch.device(value).type for value in flat((args, kwargs)) if isinstance(value, str | torch.device)]
        return kinds == [self._device.type]

    def _constant(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        self._requests += 1
        return self._constants.get(self._requests - 1, key, make if self._capacities is None else None)

    def _index(self, places: list) -> Tensor:
        if not all(type(place) is int for place in places):
            raise unknown(Tensor.__getitem__, "with a list")
        return self._constant(("index", repr(places)), lambda: torch.tensor(places, device=self._device))

    def _filled(self, like: Tensor, size: Sequence[int], value: Tensor, **kwargs) -> Tensor:
        return self._call(Tensor.new_empty, (like, size), kwargs).copy_(value)

    # Counted rows

    def _nonzero(self, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        (mask,) = args
        if kwargs != {"as_tuple": True} or self._tag(mask) or not mask.dim() or not mask.numel():
            raise unknown(Tensor.nonzero, f"with {kwargs} of shape {tuple(mask.shape)}")
        self._nonzeros += 1
        name = places_of(self._nonzeros - 1)
        if self._capacities is None:
            rows = Met(name, mask)
            self.counts.append(rows.capacity)
        elif self._nonzeros > len(self._capacities):
            raise unknown(Tensor.nonzero, "more often than learned")
        else:
            rows = Counted(name, mask, self._capacities[self._nonzeros - 1])
            self.watch(name, rows.count, rows.capacity, rows)
        for places in rows.places:
            self._tags[places] = Tag(rows)
        return rows.places

    def _of_counted(self, func: Callable, args: tuple, kwargs: dict) -> object:
        if func is Tensor.__getitem__:
            return self._gather(*args)
        if func is Tensor.__setitem__:
            return self._write(*args)
        if func is Tensor.sum and len(args) == 1 and not kwargs:
            return self._sum(args[0])
        if func == Tensor.shape.__get__ or func is Tensor.size and len(args) == 1:
            shape = CountedShape(args[0].shape)
            shape.tag = self._tag(args[0])
            return shape
        tag = row_by_row(func, args, kwargs, self._tag)
        if tag is not None and self._has_other_bits(func, args):
            result = self._on_the_slice(func, args, kwargs, tag)
        else:
            args = [value.whole() if isinstance(value, CountedShape) else value for value in args]
            result = self._call(func, args, kwargs)
        if tag is not None:
            for tensor in flat((result,)):
                self._tags[tensor] = tag
        return result

    def _gather(self, source: Tensor, index: object) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        tags = [self._tag(value) for value in index]
        front = [tag for tag in tags if tag]
        if (
            tags[: len(front)] != front
            or self._tag(source)
            or any(type(value) is not int for value in index[len(front) :])
            or any(tag.rows is not front[0].rows or tag.factor != 1 for tag in front)
            or any(value.dim() != 1 for value in index[: len(front)])
        ):
            raise unknown(Tensor.__getitem__)
        rows = front[0].rows
        if not source.requires_grad or not torch.is_grad_enabled():
            result = self._call(Tensor.__getitem__, (source, index), {})
        elif self._is_all_places(index, rows):
            result = Gather.apply(source, rows)
        else:
            raise unknown(Tensor.__getitem__, "with a gradient, with some of a mask's places")
        self._tags[result] = Tag(rows)
        return result

    def _is_all_places(self, index: tuple, rows: Counted) -> bool:
        return len(index) == len(rows.places) and all(a is b for a, b in zip(index, rows.places, strict=True))

    def _write(self, target: Tensor, index: object, value: object) -> None:
        tag = self._tag(value)
        if tag is None or tag.factor != 1 or not isinstance(index, tuple) or not self._is_all_places(index, tag.rows):
            raise unknown(Tensor.__setitem__)
        if self._zeros.get(target) != version_of(target) or target.shape != tag.rows.shape or value.requires_grad:
            raise unknown(Tensor.__setitem__, "of counted rows into what may not be zero")
        self._call(Tensor.__setitem__, (target, tag.rows.targets, tag.rows.only_valid(value)), {})

    def _has_other_bits(self, func: Callable, args: tuple) -> bool:
        """Return whether a row's result depends on how many rows there are, or on where the row is.

        Long rows are summed in another order when there are few. A processor computes the ends of a tensor by other
        instructions than its middle, which a power shows.
        """
        if func in REDUCTIONS:
            return args[0].shape[args[1]] > SHORT_ROW
        return func in POWERS and self._device.type == "cpu" and args[1] not in SIMPLE_POWERS

    def _on_the_slice(self, func: Callable, args: tuple, kwargs: dict, tag: Tag) -> Tensor:
        """Compute the rows that there are, and nothing beyond, as upstream would."""
        rows, *others = args
        if tag.factor != 1 or rows.requires_grad or any(isinstance(value, Tensor) for value in others):
            raise unknown(func, "of counted rows, whose bits depend on their number,")
        like = func(rows[:0], *others, **kwargs)
        result = torch.zeros(rows.shape[:1] + like.shape[1:], dtype=like.dtype, device=like.device)
        self._between(tag.rows, lambda number: result[:number].copy_(func(rows[:number], *others, **kwargs)))
        return result

    def _sum(self, rows: Tensor) -> Tensor:
        tag, values = self._tag(rows), rows.detach()
        if tag.factor != 1 or not values.is_contiguous():
            raise unknown(Tensor.sum)
        total = torch.empty_like(values[:0].sum())  # autocast may have its say on the type
        self._between(tag.rows, lambda number: total.copy_(values[:number].sum()))
        return Sum.apply(rows, total)

    def _between(self, rows: Counted, compute: Callable[[int], object]) -> None:
        """Have ``compute`` called with the number of rows, between two recorded pieces, under today's autocast."""
        first, self._read = self._read, len(self._watched)
        watched, kind = self._watched[: self._read], self._device.type
        autocast = dict(enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind))

        def piece() -> None:
            if first < len(watched):
                _compare(watched, torch.stack([count for _, count, _, _ in watched]).tolist())
            with torch.autocast(kind, **autocast):
                compute(rows.number)

        self._cut(piece)


def _compare(watched: list[tuple[str, Tensor, int, Counted | None]], numbers: list[int]) -> None:
    needed = {}
    for (name, _, capacity, rows), number in zip(watched, numbers, strict=False):
        needed[name] = number
        if number < 0:
            raise UnknownOperation(f"{name}: not in order")
        if number > capacity:
            raise CapacityExceeded(needed, name, capacity)
        if rows is not None:
            rows.number = number
