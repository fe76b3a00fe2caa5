"""The CPU kernel's extension, and the README for a package index; the rest is in pyproject.toml.

The kernel is optional: where it does not compile, phasor installs without it and runs on plain
torch operations. With PHASOR_NO_KERNEL set nothing is compiled: the wheel for every system.
"""

import os
import re
import sys
import sysconfig
import tomllib
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = ("module", "portable", "avx2", "avx512", "avx512bf16", "neon")
UNIX = ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"]
# one OpenMP runtime, torch's own, serves both: it is found by its name because torch loads first
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

# one wheel for every Python from 3.11, but for those without a GIL, which lack the stable interface
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

# a fenced block or a piece of code, which stay as they are; else a picture or a link
MARKDOWN = re.compile(r"(```.*?^```|`[^`\n]*`)|(!?)\[([^]]*)\]\(([^()\s]+)\)", re.M | re.S)


def index_readme(readme: str, site: str | None) -> str:
    """The README for a package index, where no other file of this repository is.

    Pictures and links to files in docs/ lead to ``site``, the address of the documentation. Of
    other files, and without a site of these too, links leave their text and pictures nothing.
    """

    def rewrite(found: re.Match[str]) -> str:
        code, picture, text, target = found.groups()
        if code or target.startswith(("https://", "http://")):
            return found[0]
        path, _, section = target.partition("#")
        if site is None or not path.startswith("docs/"):
            return "" if picture else text
        # MkDocs makes a folder of a page
        page = re.sub(r"(^|/)index\.md$", r"\1", path.removeprefix("docs/"))
        page = re.sub(r"\.md$", "/", page)
        address = f"{site.rstrip('/')}/{page}" + (f"#{section}" if section else "")
        return f"{picture}[{text}]({address})"

    return re.sub(r"\n{3,}", "\n\n", MARKDOWN.sub(rewrite, readme))


def kernel() -> list[Extension]:
    """The extension, or none where it is not wanted or its compiler does not know these options."""
    if os.environ.get("PHASOR_NO_KERNEL"):
        print("phasor is built without its CPU kernel, as PHASOR_NO_KERNEL says", file=sys.stderr)
        return []
    if sys.platform == "win32":
        print("phasor is built without its CPU kernel, which needs GCC or Clang", file=sys.stderr)
        return []
    return [
        Extension(
            "phasor._native",
            sources=[f"csrc/{name}.cpp" for name in SOURCES],
            depends=[str(path) for path in Path("csrc").iterdir()],
            extra_compile_args=UNIX + OPENMP,
            extra_link_args=[*OPENMP, "-Wl,-s"] if OPENMP else [],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
            py_limited_api=STABLE,
            optional=True,
        )
    ]


class BuildInParallel(build_ext):
    """Compiles as many sources at a time as there are processors: one alone takes half a minute."""

    def build_extensions(self) -> None:
        """Build the extension, if there is one."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPool() as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
            return [path for one in objects for path in one]

        self.compiler.compile = compile_each
        super().build_extensions()


class TagByContent(bdist_wheel):
    """Tags a wheel without a kernel as one for every system, which no cache keeps for this one.

    A kernel that does not compile is left out, which is known only after the build.
    """

    def get_tag(self) -> tuple[str, str, str]:
        """The tag, for which everything is built already."""
        outputs = self.get_finalized_command("build_ext").get_outputs()
        self.root_is_pure = not any(Path(path).exists() for path in outputs)
        return super().get_tag()


project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
extensions = kernel()
setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE and extensions else {},
    ext_modules=extensions,
    cmdclass={"bdist_wheel": TagByContent, "build_ext": BuildInParallel},
    long_description=index_readme(
        Path("README.md").read_text("utf-8"), project.get("urls", {}).get("Documentation")
    ),
    long_description_content_type="text/markdown",
)
