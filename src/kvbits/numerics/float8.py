"""e4m3 floating point in a byte, with a scale (the OCP 8-bit format: 1 sign, 4 exponent, 3 mantissa bits, no inf).

Bytes are ``torch.uint8`` and the conversions are integer arithmetic: every device has them, also those without
``float8_e4m3fn`` (MPS, GPUs before sm_89), and on a CPU they are several times as fast as torch's own.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def decode_table() -> torch.Tensor:
    """The 256 values of a byte as float32, built with integer arithmetic from the format's definition."""
    byte = torch.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = torch.where(
        exponent == 0,
        mantissa.double() * 2.0**-9,
        (8 + mantissa).double() * 2.0 ** (exponent.double() - 10),
    )
    magnitude[(byte & 127) == 127] = torch.nan
    return torch.where(byte >= 128, -magnitude, magnitude).float()


def encode(x: torch.Tensor) -> torch.Tensor:
    """float32 to e4m3 bytes, round to nearest even, saturating at +-448. ``x`` must be finite."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    octave = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # the power of two below |x|
    quantum = octave.clamp(min=2.0**-6) / 8
    rounded = torch.round(x / quantum) * quantum
    # An e4m3 value times 2**-8 has the same exponent and mantissa bits as a half, three places further up.
    half = (rounded * 2.0**-8).to(torch.float16).view(torch.int16)
    return (((half >> 7) & 0x7F) | ((half >> 8) & 0x80)).to(torch.uint8)


def decode(byte: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes (not NaN, which :func:`encode` never writes) to float32, through the bits of a half."""
    bits = byte.view(torch.int8).to(torch.int16)  # the sign is now in bits 7 to 15
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16).float().mul_(2.0**8)
