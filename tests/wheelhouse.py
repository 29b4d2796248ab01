"""Small wheels that stand for Ray and others, so that pip installs for real where there is no internet."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

RAY = ("ray", "aiohttp", "aiohttp_cors", "grpc")  # what `ray[default]` brings, as far as anybody looks


def wheel(folder: Path, name: str, version: str, modules: tuple[str, ...] = ()) -> Path:
    info = f"{name}-{version}.dist-info"
    files = {f"{module}/__init__.py": f"__version__ = {version!r}\n" for module in modules or (name,)}
    extra = "Provides-Extra: default\n" if name == "ray" else ""
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extra}"
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made


def fill(folder: Path) -> Path:
    """Two versions of Ray, and a package that is none."""
    for version in ("2.59.0", "2.60.0"):
        wheel(folder, "ray", version, RAY)
    wheel(folder, "tinylib", "1.0")
    return folder
