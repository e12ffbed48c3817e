"""Removes from installed packages what no running program reads: symbols for debuggers, tests, sources and headers.

    python3 slim.py FOLDER

A library is cut behind the last segment that the loader maps, which the program headers name. The rest is the table of
sections with the symbols; no other tool is needed, so that every base image can build the gateway's image.
"""

import shutil
import struct
import sys
from pathlib import Path

NOT_READ = {".pyi", ".pyx", ".pxd", ".h", ".hpp", ".c", ".cpp", ".a"}


def main() -> None:
    folder = Path(sys.argv[1])
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and path.name == "tests":
            shutil.rmtree(path)
        elif path.is_file() and path.suffix in NOT_READ:
            path.unlink()
        elif path.is_file() and ".so" in path.suffixes:
            cut(path)


def cut(library: Path) -> None:
    """Ignores files that are not 64-bit ELF files in the byte order of this machine."""
    data = bytearray(library.read_bytes())
    if data[:6] != b"\x7fELF\x02" + (b"\x01" if sys.byteorder == "little" else b"\x02"):
        return
    headers, _, _, _, size, count = struct.unpack_from("=QQIHHH", data, 32)
    # Of each program header: p_offset and p_filesz.
    ends = [sum(struct.unpack_from("=Q16xQ", data, headers + number * size + 8)) for number in range(count)]
    struct.pack_into("=Q", data, 40, 0)  # e_shoff
    struct.pack_into("=HH", data, 60, 0, 0)  # e_shnum, e_shstrndx
    library.write_bytes(data[: max(*ends, headers + count * size)])


if __name__ == "__main__":
    main()
