"""Bugs in the convolutions of the CPU engine: what a window reads, results in planes, rounds of images."""

from __future__ import annotations

from mutants import register

from csrc import conv_cases, planted_engine
from csrc import cpu_engine as engine


def _check(seed: int) -> None:
    with planted_engine.three_threads() as library:
        conv_cases.check_library(library, seed)


def check(seed: int) -> None:
    """Every case of conv_cases, with three threads; a bug may read or write what is not there."""
    planted_engine.in_a_child(_check, seed)


# A header is compiled with both files that read it.
_WITH = (
    ("layer.cpp", '#include "cpu/layer.h"', '#include  "cpu/layer.h"'),
    ("conv.cpp", '#include "cpu/layer.h"', '#include  "cpu/layer.h"'),
)
_GROUPED = (("grouped_conv.cpp", '#include "cpu/grouped_conv.h"', '#include  "cpu/grouped_conv.h"'),)
EDITS = [
    (
        (("windows.h", "if (y < 0 || y >= of_.height)", "if (y < 0 || y > of_.height)"), *_WITH),
        "the line below the image is read",
    ),
    (
        (("windows.h", "std::clamp<int64_t>(-left, 0, taps)", "std::clamp<int64_t>(-left - 1, 0, taps)"), *_WITH),
        "a pixel left of the image is read",
    ),
    ((("windows.h", "i_ = 0;\n      ++image_;", "i_ = 0;"), *_WITH), "every image reads the first"),
    ((("image_codes.cpp", "to[i] = from[i] ^ 0x80", "to[i] = from[i]"),), "ready codes keep their sign bit"),
    (
        (("windows.h", "const int64_t x = left + s * step;", "const int64_t x = left + s;"), *_WITH),
        "dilation is left out within a line",
    ),
    (
        (
            (
                "layer.cpp",
                "window.copy(static_cast<uint8_t>(zeros_[own_zeros_ ? r : 0]), flat)",
                "window.copy(128, flat)",
            ),
        ),
        "what lies outside is code 0, not the zero point",
    ),
    (
        (("layer.cpp", "from.zero_point[(m + r) / from.rows_each]", "from.zero_point[m / from.rows_each]"),),
        "a strip has the zero point of its first image",
    ),
    (
        (("layer.cpp", "from.scale[(m + r) / from.rows_each]", "from.scale[m / from.rows_each]"),),
        "a strip has the scale of its first image",
    ),
    (
        (("layer.cpp", "std::min(plane - pixel, tile.rows - r)", "tile.rows - r"),),
        "a tile of results runs on beyond its image",
    ),
    (
        (("layer.cpp", "round_up((extent_.k + 3) / 4,", "round_up(extent_.k / 4,"),),
        "codes after the last whole quad are not multiplied",
    ),
    (
        (("layer.cpp", "a_ = windows.codes + m * extent_.k;", "a_ = windows.codes;"),),
        "pixels that are rows are read from the first one on",
    ),
    (
        (
            ("conv.cpp", "kRoundBytes = 4 << 20", "kRoundBytes = 400"),
            ("conv.cpp", "const int64_t row = first * windows_.pixels();", "const int64_t row = 0 * first;"),
        ),
        "every round writes its results over the first",
    ),
    (
        (("image_codes.cpp", "planes + c * kPixels)", "planes)"),),
        "every channel has the codes of the last",
    ),
    (
        (
            (
                "image_codes.cpp",
                "to + (image * pixels + begin) * channels;",
                "to + image * pixels * channels;",
            ),
        ),
        "pieces of ready planes all go to the first pixel",
    ),
    (
        (
            ("window_taps.h", "r < w.kernel[0] ? r * w.kernel[1] + s : -1", "r < 3 ? r * w.kernel[1] + s : -1"),
            *_GROUPED,
        ),
        "lines below the third are not woven in",
    ),
    (
        (("window_taps.h", "(s * w.dilation[1] * planes + plane)", "(s * planes + plane)"), *_GROUPED),
        "depthwise: dilation is left out",
    ),
    (
        (
            (
                "grouped_conv.cpp",
                "const bool is_inside = y >= 0 && y < windows_.height;",
                "const bool is_inside = true;",
            ),
        ),
        "depthwise: lines outside of the image are read",
    ),
    (
        (
            (
                "grouped_conv.cpp",
                "for (int64_t x = last; x < columns; ++x) std::memset",
                "for (int64_t x = last; x < last; ++x) std::memset",
            ),
        ),
        "depthwise: what is right of the image is what was there",
    ),
    (
        (("window_taps.h", "c < group_channels ? (r", "c < 4 * dwords ? (r"), *_GROUPED),
        "bytes that are no code have weights",
    ),
    (
        (("grouped_conv.cpp", "if (block == block_) return;", "if (block_ >= 0) return;"),),
        "every block has the weights of the first",
    ),
    (
        (("grouped_conv.cpp", "windows_.channels + group_ * taps_.group_channels", "windows_.channels"),),
        "every block reads the first groups",
    ),
    (
        (("grouped_conv.cpp", "const int64_t from = first_ + n % ld_;", "const int64_t from = n % ld_;"),),
        "folded: the last channels have the scales of the first",
    ),
    (
        (("grouped_conv.cpp", "const int64_t rest = held_ * ld_ % kBlockN;", "const int64_t rest = 0;"),),
        "folded: the last pixels are not finished",
    ),
    (
        (("grouped_conv.cpp", ": widest < kernels_.lanes", ": widest < 64"),),
        "dwords beyond a vector are looked for in it",
    ),
    (
        (("grouped_conv.cpp", "rows.zero_point + image * rows.zero_point_step", "rows.zero_point"),),
        "groups: every image has the zero point of the first",
    ),
]

if engine.compiler() is not None:
    for _edits, _name in EDITS:
        register(planted_engine.edit_engine(*_edits), check, name=_name, area="csrc/cpu/conv.cpp")
