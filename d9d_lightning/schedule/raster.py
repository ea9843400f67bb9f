"""PNG files of our own timelines, with the standard library alone.

The pictures of this package are SVG made of rectangles and short texts, so that is all that is understood here: no
general SVG. Texts are set in a small bitmap font.
"""

from __future__ import annotations

import functools
import struct
import xml.etree.ElementTree as ElementTree
import zlib

from d9d_lightning.errors import ScheduleError

__all__ = ["draw_png"]

_GLYPH_WIDTH, _GLYPH_HEIGHT = 5, 7
# Seven rows of five dots, as two hexadecimal digits a row.
_FONT = """
0=0e11131519110e 1=040c040404040e 2=0e11010608101f 3=0e11010601110e 4=02060a121f0202 5=1f101e0101110e 6=06081e1111110e
7=1f010204080808 8=0e11110e11110e 9=0e11110f01020c A=0e11111f111111 B=1e11111e11111e C=0e11101010110e D=1e11111111111e
E=1f10101e10101f F=1f10101e101010 G=0e11101713110f H=1111111f111111 I=0e04040404040e J=0702020202120c K=11121418141211
L=1010101010101f M=111b1515111111 N=11191513111111 O=0e11111111110e P=1e11111e101010 Q=0e11111115120d R=1e11111e141211
S=0f10100e01011e T=1f040404040404 U=1111111111110e V=11111111110a04 W=11111115151b11 X=11110a040a1111 Y=11110a04040404
Z=1f01020408101f a=00000e010f110f b=10101e1111111e c=00000f1010100f d=01010f1111110f e=00000e111f100e f=0609081c080808
g=000f11110f010e h=10101e11111111 i=04000c0404040e j=0200060202120c k=10101214181412 l=0c04040404040e m=00001a15151515
n=00001e11111111 o=00000e1111110e p=00001e111e1010 q=00000f110f0101 r=00001619101010 s=00000f100e011e t=08081c08080906
u=0000111111130d v=00001111110a04 w=0000111115150a x=0000110a040a11 y=000011110f010e z=00001f0204081f .=00000000000606
,=00000000060204 :=00060600060600 ;=00060600060204 -=0000001f000000 &=08141408151209 %=18190204081303 (=02040808080402
)=08040202020408 /=01010204081010 +=0004041f040400 _=0000000000001f '=04040800000000 ?=0e110102040004
"""
_GLYPHS = dict(pair.split("=", 1) for pair in _FONT.split())


def draw_png(svg: str) -> bytes:
    """The PNG of a picture that this package drew as SVG.

    Args:
        svg: Rectangles and texts, as all ``draw_svg`` of this package make them.

    Raises:
        ScheduleError: The picture has no size in pixels.
    """
    root = ElementTree.fromstring(svg)
    try:
        canvas = _Canvas(int(root.attrib["width"]), int(root.attrib["height"]))
    except (KeyError, ValueError) as error:
        raise ScheduleError(f"an SVG without width and height in pixels cannot be made a PNG: {error}") from error
    size = float(root.get("font-size", 10))
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "rect":
            canvas.fill(element)
        elif kind == "text":
            canvas.write(element, float(element.get("font-size", size)))
    return canvas.encode()


def _length(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, 0))


@functools.lru_cache(maxsize=64)
def _colour(text: str) -> bytes:
    if text.startswith("#") and len(text) in (4, 7):
        digits = text[1:] if len(text) == 7 else "".join(2 * digit for digit in text[1:])
        return bytes.fromhex(digits)
    return {"white": b"\xff\xff\xff"}.get(text, b"\0\0\0")


class _Canvas:
    """Pixels, three bytes each."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows = [bytearray(b"\xff" * 3 * width) for _ in range(height)]

    def fill(self, element: ElementTree.Element) -> None:
        """A rectangle, with a thin frame where it has one."""
        x, y = _length(element, "x"), _length(element, "y")
        width, height = float(self.width), float(self.height)
        if element.get("width") != "100%":
            width, height = _length(element, "width"), _length(element, "height")
        left, right = round(x), max(round(x + width), round(x) + 1)
        top, bottom = round(y), max(round(y + height), round(y) + 1)
        self._paint(left, top, right, bottom, _colour(element.get("fill", "black")))
        stroke = element.get("stroke")
        if stroke is not None and right - left > 2:
            colour = _colour(stroke)
            for box in ((left, top, left + 1, bottom), (left, top, right, top + 1), (left, bottom - 1, right, bottom)):
                self._paint(*box, colour)

    def write(self, element: ElementTree.Element, size: float) -> None:
        """A line of text; ``y`` is its base line."""
        scale = max(1, round(size / 10))
        text = element.text or ""
        x = _length(element, "x")
        if element.get("text-anchor") == "middle":
            x -= len(text) * (_GLYPH_WIDTH + 1) * scale / 2
        top = round(_length(element, "y")) - _GLYPH_HEIGHT * scale
        for position, letter in enumerate(text):
            if letter != " ":
                left = round(x) + position * (_GLYPH_WIDTH + 1) * scale
                self._stamp(_GLYPHS.get(letter, _GLYPHS["?"]), left, top, scale)

    def _stamp(self, glyph: str, left: int, top: int, scale: int) -> None:
        for row, bits in enumerate(bytes.fromhex(glyph)):
            for column in range(_GLYPH_WIDTH):
                if bits >> (_GLYPH_WIDTH - 1 - column) & 1:
                    x, y = left + column * scale, top + row * scale
                    self._paint(x, y, x + scale, y + scale, b"\0\0\0")

    def _paint(self, left: int, top: int, right: int, bottom: int, colour: bytes) -> None:
        left, right = max(0, left), min(self.width, right)
        for y in range(max(0, top), min(self.height, bottom)):
            self._rows[y][3 * left : 3 * right] = colour * max(0, right - left)

    def encode(self) -> bytes:
        """The file: header, one compressed block of rows, end."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in self._rows), 6)
        chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
