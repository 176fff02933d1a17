"""Writes small sound files, and what others make of them: sounds/ in tests/data/golden/sounds.tar.xz.

    python rust/audio/tests/oracle.py    packs the archive anew

`expected.json` has of each file the rate, the samples of some places (libsndfile's), how many there are, and of some frames the
features of Transformers' `WhisperFeatureExtractor` over samples that soxr brought to 16,000 a second.

Needs numpy, soundfile, soxr, torch and transformers==5.24.0.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from transformers import WhisperFeatureExtractor

ARCHIVE = Path(__file__).parents[3] / "tests" / "data" / "golden" / "sounds.tar.xz"
RATE = 16000
CHUNK = 30 * RATE
LENGTH = 0.12
PLACES = 16
FRAMES = (0, 5)
FILES = [
    ("pcm16.wav", 16000, 1, "PCM_16"),
    ("pcm8.wav", 8000, 1, "PCM_U8"),
    ("pcm24.wav", 11025, 2, "PCM_24"),
    ("float.wav", 16000, 1, "FLOAT"),
    ("stereo.flac", 16000, 2, "PCM_16"),
    ("mono.mp3", 16000, 1, "MPEG_LAYER_III"),
    ("stereo.mp3", 44100, 2, "MPEG_LAYER_III"),
    ("mono.ogg", 16000, 1, "VORBIS"),
]


def voice(rate: int, channels: int) -> np.ndarray:
    """Something with the spectrum of a vowel, far below half of all rates."""
    time = np.arange(int(rate * LENGTH)) / rate
    phase = 2 * np.pi * np.cumsum(130 + 30 * np.sin(2 * np.pi * 4 * time)) / rate
    tone = sum(np.sin(k * phase) / k for k in range(1, 18)) * 0.25 * np.sin(np.pi * time / LENGTH)
    return np.stack([tone * (1 - 0.5 * channel) for channel in range(channels)], 1)


def features(samples: np.ndarray, num_mel_bins: int) -> np.ndarray:
    """`[frames, mel bins]`."""
    extractor = WhisperFeatureExtractor(feature_size=num_mel_bins)
    options: dict[str, Any] = {"sampling_rate": RATE, "truncation": False, "padding": True, "pad_to_multiple_of": CHUNK}
    return extractor(samples, return_tensors="np", **options)["input_features"][0].T


def main() -> None:
    files: dict[str, bytes] = {}
    expected = {}
    for name, rate, channels, subtype in FILES:
        content = io.BytesIO()
        soundfile.write(content, voice(rate, channels), rate, subtype=subtype, format=name.rsplit(".", 1)[1].upper())
        files[name] = content.getvalue()
        samples, _ = soundfile.read(io.BytesIO(files[name]), dtype="float32", always_2d=True)
        samples = samples.mean(1)
        places = np.linspace(0, len(samples) - 1, PLACES).astype(int)
        found = features(samples if rate == RATE else soxr.resample(samples, rate, RATE), 128)
        expected[name] = {
            "rate": rate,
            "len": len(samples),
            "samples": [[int(place), round(float(samples[place]), 7)] for place in places],
            "features": [[frame, [round(float(value), 5) for value in found[frame][::4]]] for frame in FRAMES],
        }
    files["expected.json"] = json.dumps(expected, separators=(",", ":")).encode()
    with tarfile.open(ARCHIVE, "w:xz", preset=9, format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"sounds/{name}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main()
