"""Lossless shrinking of a tensor's bytes. No torch.

The bytes of an element are not alike: sign and exponent of hidden states repeat themselves, the rest is noise. So the
most significant byte of every element is set apart (the shuffle filter of HDF5 and Blosc) and deflated (RFC 1951);
deflating the other bytes, too, takes as long again for each and saves 1 % of them at most. Huffman codes alone:
neighbouring elements have nothing in common that a search for repetitions would find.
"""

from __future__ import annotations

import zlib

from relay.errors import FrameInvalid

#: raw deflate, without a checksum: the link has its own
_WINDOW_BITS = -15


def shrink(data: memoryview, width: int) -> tuple[int, memoryview]:
    """The elements of `width` bytes, little-endian, in fewer bytes if that can be: (n, body).

    `body` begins with n bytes, the deflated most significant bytes of all elements; the other bytes follow, first
    those that stand first in an element. n = 0: it would not be smaller, `body` is `data`.
    """
    whole = bytes(data)
    planes = [whole[index::width] for index in range(width)]
    deflater = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, zlib.DEF_MEM_LEVEL, zlib.Z_HUFFMAN_ONLY)
    deflated = deflater.compress(planes[-1]) + deflater.flush()
    if len(deflated) >= len(planes[-1]):
        return 0, data
    return len(deflated), memoryview(b"".join((deflated, *planes[:-1])))


def restore(num_deflated: int, body: memoryview, width: int, num_elements: int) -> memoryview:
    """The bytes of so many elements that `shrink` made smaller; never makes more of `body`. Raises `FrameInvalid`."""
    if body.nbytes != num_deflated + (width - 1) * num_elements:
        raise FrameInvalid(f"Tensor.deflated: {num_deflated} bytes do not fit {body.nbytes} after the header")
    data = bytearray(width * num_elements)
    data[width - 1 :: width] = _inflate(body[:num_deflated], num_elements)
    for index in range(width - 1):
        start = num_deflated + index * num_elements
        data[index::width] = body[start : start + num_elements]
    return memoryview(data)


def _inflate(deflated: memoryview, num_bytes: int) -> bytes:
    inflater = zlib.decompressobj(_WINDOW_BITS)
    try:
        # one byte more than wanted: then too long a stream shows, and the end of the right one is seen
        plain = inflater.decompress(deflated, num_bytes + 1)
    except zlib.error as error:
        raise FrameInvalid(f"Tensor.deflated: {error}") from error
    if len(plain) != num_bytes or not inflater.eof or inflater.unused_data:
        raise FrameInvalid(f"Tensor.deflated: does not inflate to {num_bytes} bytes")
    return plain
