"""Queries as operands of the kernels that score rotated digests, written by the kernel that predicts a query."""

from __future__ import annotations

import torch

from .rotated import FIRST, ONE_BIT, SECOND, made_finite, operand_dim, rotate


def query_digits(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Queries as the operands of the kernels that score digests of 1 or 2 ``bits``: R q in int8.

    A number is 256 a + b units, a and b the two digits. For a plane it is R q times the plane's level and 2^-r for
    channel 4 c + r, which stands at r D' / 4 + c: what one mask takes from the words of a plane is consecutive. D' is
    ``operand_dim(D)``; channels beyond D are 0.

    Args:
        q: [B, HQ, D] any float dtype.
    Returns:
        [B, HQ, bytes] uint8: a and then b [1 + bits, D'] for the mean and each plane; in float32 the unit, and what a
        token with every bit of its planes set would get; 8 bytes of padding.
    """
    x = rotate(made_finite(q.float()))
    unit = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (127 * 256)
    x = torch.nn.functional.pad(x / unit, (0, operand_dim(x.shape[-1]) - x.shape[-1]))
    numbers, total = [x.round()], torch.zeros_like(unit)
    power = 2.0 ** torch.arange(4, device=q.device)[:, None]
    for level in (ONE_BIT,) if bits == 1 else (FIRST, SECOND):
        y = (x.unflatten(-1, (-1, 4)).mT * (level / power)).round()
        total += (y * power).sum((-2, -1))[..., None] * unit
        numbers.append(y.flatten(-2))
    number = torch.cat(numbers, -1).int()
    high = (number + 128) >> 8
    digits = torch.cat([high, number - 256 * high], -1).to(torch.int8)
    rest = torch.cat([unit, total, torch.zeros_like(unit).expand(*unit.shape[:-1], 2)], -1)
    return torch.cat([digits.view(torch.uint8), rest.view(torch.uint8)], -1)
