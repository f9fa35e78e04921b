"""Get what a Vulkan build needs: shader compiler, software device, and headers that are new enough.

The Vulkan backend of llama.cpp uses ``VK_EXT_layer_settings``, which the headers of Debian 12 do not know. If those of the
machine are too old, the two header packages of a later Debian release are downloaded with apt and unpacked into a folder;
nothing of that release is installed. The mirror is the one that apt is set up with.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HEADERS_RELEASE = "trixie"  # Debian 13
HEADERS_PACKAGES = ("libvulkan-dev", "spirv-headers")
NEEDED_STRUCT = "struct LayerSettingEXT"
ICD_DIRS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")


class NotPossibleError(Exception):
    """This machine cannot run the test; the message says why."""


@dataclass(frozen=True)
class Vulkan:
    """Where the parts are.

    Attributes:
        glslc: The shader compiler.
        library: The loader, ``libvulkan.so.1``.
        prefix: Prefix of the headers (``prefix/include/vulkan``, ``prefix/share/cmake/SPIRV-Headers``).
        icd: Description of the software device's driver, for ``VK_ICD_FILENAMES``.
    """

    glslc: Path
    library: Path
    prefix: Path
    icd: Path


def apt_get(*arguments: str, what: str) -> str:
    """Run apt-get and return what it printed.

    Raises:
        NotPossibleError: If it is missing or fails.
    """
    if shutil.which("apt-get") is None:
        raise NotPossibleError(f"{what}: there is no apt-get here")
    result = subprocess.run(
        ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-6:])
        raise NotPossibleError(f"{what}: apt-get failed:\n{tail}")
    return result.stdout


def find_library() -> Path | None:
    """Return the Vulkan loader, if it is installed."""
    result = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False)
    found = re.search(r"libvulkan\.so\.1 .*x86-64.* => (\S+)|libvulkan\.so\.1 .* => (\S+)", result.stdout)
    return Path(found[1] or found[2]) if found else None


def find_icd() -> Path | None:
    """Return the driver description of lavapipe, Mesa's software device."""
    files = (file for folder in ICD_DIRS for file in sorted(Path(folder).glob("lvp_icd*.json")))
    return next(files, None)


def headers_fit(prefix: Path) -> bool:
    """Return whether the headers below a prefix are new enough and complete."""
    structs = prefix / "include" / "vulkan" / "vulkan_structs.hpp"
    spirv = prefix / "share" / "cmake" / "SPIRV-Headers" / "SPIRV-HeadersConfig.cmake"
    return spirv.exists() and structs.exists() and NEEDED_STRUCT in structs.read_text(errors="replace")


def install_tools() -> None:
    """Install shader compiler, loader and software device where one of them is missing."""
    missing = []
    if shutil.which("glslc") is None:
        missing.append("glslc")
    if find_library() is None:
        missing.append("libvulkan1")
    if find_icd() is None:
        missing.append("mesa-vulkan-drivers")
    if not missing:
        return
    what = f"cannot install {', '.join(missing)}"
    if os.geteuid() != 0:
        raise NotPossibleError(f"{what}: not root. Install them (Debian: apt-get install {' '.join(missing)}) and run again")
    print(f"installing: {' '.join(missing)}", flush=True)
    apt_get("update", what=what)
    apt_get("install", "-y", "--no-install-recommends", *missing, what=what)


def debian_mirror() -> tuple[str, str]:
    """Return the URI and the signing key (or "") of the Debian mirror that apt is set up with."""
    wanted = "$(REPO_URI)|$(ORIGIN)|$(COMPONENT)|$(CODENAME)|$(SIGNED_BY)"
    rows = apt_get("indextargets", "--format", wanted, "Created-By: Packages", what="cannot read apt's sources").splitlines()
    for row in rows:
        uri, origin, component, codename, key = row.split("|", 4)
        if origin == "Debian" and component == "main" and "-" not in codename:
            return uri, "" if key.startswith("$") else key
    raise NotPossibleError("the Vulkan headers of this system are too old, and apt has no Debian mirror to take newer ones from")


def signing_key(key: str) -> str:
    """Return the value for Signed-By: what apt says, else Debian's keyring where that exists."""
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return key or (str(keyring) if keyring.exists() else "")


def fetch_headers(folder: Path) -> Path:
    """Download the header packages of a later Debian release and unpack them; return their prefix."""
    prefix = folder / "headers" / "usr"
    if headers_fit(prefix):
        return prefix
    uri, key = debian_mirror()
    apt = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    key = signing_key(key)
    source = f"Types: deb\nURIs: {uri}\nSuites: {HEADERS_RELEASE}\nComponents: main\n" + (f"Signed-By: {key}\n" if key else "")
    (apt / "later.sources").write_text(source)
    settings = {
        "Dir::Etc::SourceList": apt / "later.sources",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",  # the folder may not be readable for apt's own user
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    what = f"cannot get the Vulkan headers of Debian's {HEADERS_RELEASE}"
    print(f"unpacking {', '.join(HEADERS_PACKAGES)} of Debian's {HEADERS_RELEASE} into {prefix}", flush=True)
    apt_get(*options, "update", what=what)
    here = Path.cwd()
    os.chdir(apt / "packages")
    try:
        apt_get(*options, "download", *HEADERS_PACKAGES, what=what)
    finally:
        os.chdir(here)
    for package in sorted((apt / "packages").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder / "headers"], check=True)
    if not headers_fit(prefix):
        raise NotPossibleError(f"{what}: the packages do not hold {NEEDED_STRUCT}")
    return prefix


def prepare(folder: Path) -> Vulkan:
    """Return everything that a build needs, installing and fetching what is missing.

    Raises:
        NotPossibleError: If something is missing and cannot be had here.
    """
    install_tools()
    system = Path("/usr")
    prefix = system if headers_fit(system) else fetch_headers(folder)
    glslc, library, icd = shutil.which("glslc"), find_library(), find_icd()
    if not glslc or library is None or icd is None:
        raise NotPossibleError(f"still missing after installing: glslc={glslc}, loader={library}, lavapipe={icd}")
    return Vulkan(Path(glslc), library, prefix, icd)
