"""Checks untrusted image files, and removes what Pillow need not read.

Pillow reads more than pixels, sometimes without limits: GIF comments take quadratic time, and older versions
copy gigabytes for EXIF entries that all point to the same bytes. So a file is parsed here first, block by
block:

1. The format must be one of FORMATS, recognized by the first bytes.
2. Width and height are read before any decoder allocates memory for them, and bounded.
3. Only pixels, transparency and EXIF's orientation are kept. Comments, profiles and thumbnails are dropped.
4. Animated files, and files with too many scans, are refused.

Invalid data stays in the file, so that the decoder reports it. No Pillow here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FILE_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 2**20
"""Maximum pixels of an image before scaling. Phones take pictures of 50 million."""

MAX_REQUEST_PIXELS = MAX_PIXELS
"""Maximum pixels of all images of a request together."""

MAX_SIDE = 65_535
"""Maximum side of an image in pixels, JPEG's own limit. Scaling a longer side takes a table of
gigabytes."""

MAX_SCANS = 100
"""Maximum scans of a progressive JPEG, each of which is a pass over all pixels. Cameras and
programs write about 10."""


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A file that can be decoded. `orientation`: EXIF's; 1 is upright."""

    data: bytes
    format: str
    width: int
    height: int
    orientation: int = 1
    weight: int = 1

    @property
    def num_pixels(self) -> int:
        """Number of pixels that counts toward limits: twice the actual number for progressive JPEG
        and three times for WebP, whose decoders need that much more memory."""
        return self.width * self.height * self.weight


def measured(data: bytes) -> PictureFile:
    """Determines format and size without decoding. RequestError (field "image") if the file can't
    be an image within the limits."""
    if len(data) > MAX_FILE_BYTES:
        raise bad(f"the file has {len(data)} bytes, more than {MAX_FILE_BYTES}")
    for mark, read in _READERS.items():
        if re.match(mark, data, re.DOTALL):
            try:
                file = read(data)
            except (struct.error, IndexError, OverflowError):
                raise bad("it can't be read: the file is cut off") from None
            check_size(file.width, file.height)
            if file.num_pixels > MAX_PIXELS:
                raise bad(
                    f"it has {file.width} by {file.height} pixels, which count {file.weight} times in this format, and more "
                    f"than {MAX_PIXELS} in all; make it smaller, or send it as PNG or baseline JPEG"
                )
            return file
    raise bad(f"it is no file of the formats {', '.join(FORMATS)}")


def check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise bad("it has no pixels")
    if max(width, height) > MAX_SIDE:
        raise bad(f"it has {width} by {height} pixels, and a side may have {MAX_SIDE}; cut it")
    if width * height > MAX_PIXELS:
        raise bad(
            f"it has {width} by {height} pixels, more than {MAX_PIXELS} in all; make it smaller"
        )


def bad(why: str) -> RequestError:
    return RequestError(f"a picture: {why}", field="image")


def _png(data: bytes) -> PictureFile:
    width, height = struct.unpack_from(">II", data, 16)
    kept, orientation, at = [data[:8]], 1, 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        if kind == b"acTL" and data[at + 8 : at + 12] > b"\0\0\0\1":
            raise bad("it moves: send one of its frames")
        if kind == b"eXIf":
            orientation = _orientation(data[at + 8 : end - 4])
        if kind == b"tRNS" or not kind[:1].islower():
            kept.append(data[at:end])
        at = end
    return PictureFile(b"".join(kept), "PNG", width, height, orientation)


_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}


def _jpeg(data: bytes) -> PictureFile:
    kept, orientation, at = [data[:2]], 1, 2
    width = height = 0
    is_progressive = False
    while True:
        if data[at] != 0xFF:
            raise bad("it can't be read: a marker is missing in the JPEG")
        kind = data[at + 1]
        if kind == 0xFF:  # a fill byte
            at += 1
            continue
        if kind == 0xDA:
            break
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if end < at + 4:
            raise bad("it can't be read: a part of the JPEG has no length")
        body = data[at + 4 : end]
        if kind in _SIZES:
            height, width = struct.unpack_from(">HH", body, 1)
            is_progressive = kind in _PROGRESSIVE
        if kind == 0xE1 and body.startswith(b"Exif\0\0"):
            orientation = _orientation(body[6:])
        is_about_colours = body.startswith((b"JFIF", b"Adobe"))
        if not (0xE0 <= kind <= 0xEF or kind == 0xFE) or is_about_colours:
            kept.append(data[at:end])
        at = end
    if data.count(b"\xff\xda", at) > MAX_SCANS:
        raise bad(f"it has more than {MAX_SCANS} scans; send it as baseline JPEG")
    kept.append(data[at:])
    return PictureFile(b"".join(kept), "JPEG", width, height, orientation, 1 + is_progressive)


def _webp(data: bytes) -> PictureFile:
    width = height = at = 0
    orientation, at = 1, 12
    while at + 8 <= len(data):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        body = at + 8
        if kind == b"VP8X" and not width:
            if data[body] & 2:
                raise bad("it moves: send one of its frames")
            width = 1 + int.from_bytes(data[body + 4 : body + 7], "little")
            height = 1 + int.from_bytes(data[body + 7 : body + 10], "little")
        elif kind == b"VP8 " and not width:
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, body + 6))
        elif kind == b"VP8L" and not width:
            bits = struct.unpack_from("<I", data, body + 1)[0]
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        elif kind in (b"ANIM", b"ANMF"):
            raise bad("it moves: send one of its frames")
        elif kind == b"EXIF":
            orientation = _orientation(data[body : body + size].removeprefix(b"Exif\0\0"))
        at = body + size + (size & 1)
    return PictureFile(data, "WEBP", width, height, orientation, weight=3)


def _gif(data: bytes) -> PictureFile:
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    kept, num_images = [data[:at]], 0
    while at < len(data) and data[at] != 0x3B:
        begin, kind = at, data[at]
        if kind == 0x2C:
            num_images += 1
            if num_images > 1:
                raise bad("it moves: send one of its frames")
            left, top, own_width, own_height, flags = struct.unpack_from("<HHHHB", data, at + 1)
            width, height = max(width, left + own_width), max(height, top + own_height)
            at += 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
        elif kind == 0x21:
            at += 2
        else:
            raise bad("it can't be read: an unknown block in the GIF")
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
        if kind == 0x2C or data[begin + 1] == 0xF9:  # image data, or the colours' transparency
            kept.append(data[begin:at])
    return PictureFile(b"".join((*kept, b"\x3b")), "GIF", width, height)


def _bmp(data: bytes) -> PictureFile:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = map(abs, struct.unpack_from("<ii", data, 18))
    return PictureFile(data, "BMP", width, height)


_READERS: dict[bytes, Callable[[bytes], PictureFile]] = {
    rb"\x89PNG\r\n\x1a\n....IHDR": _png,
    rb"\xff\xd8\xff": _jpeg,
    rb"RIFF....WEBP": _webp,
    rb"GIF8[79]a": _gif,
    rb"BM": _bmp,
}


def _orientation(exif: bytes) -> int:
    """EXIF orientation, from 1 to 8. It is 1 if the file names none."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (begin,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, begin)
        for at in range(begin + 2, begin + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, at)
            if tag == 0x0112 and kind == 3:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
