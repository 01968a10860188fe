"""The cubin manifest: which bytes each kernel name stands for.

It ships in the package and is the root of trust: whatever delivers a cubin is checked against it.
CUBIN_RUNTIME_MANIFESTS adds private ones.

    format: 1
    sets:
      fmha_sm90:
        version: "0.1.0"
        files:
          fmha_sm90_sm90a_bf16: {sha256: 9f86d0..., size: 81920}

A set that others publish also says where its files lie in the publisher's own layout: `path` for the set,
`file` for each of its files. It has the name of the Python package that they come in.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cubin_runtime import strict_yaml
from cubin_runtime.errors import ArtifactNotFoundError, ManifestError
from cubin_runtime.settings import Settings, settings

FORMAT = "1"
FILE_NAME = "cubins_manifest.yaml"
MAX_SIZE = 4 * 2**30  # bytes; real cubins are below a few MiB, so more is a mistake or an attack
MAX_MANIFEST_SIZE = 64 * 2**20  # bytes; some hundred thousand cubins

# Names become parts of paths. \Z because $ would let a final newline through.
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}\Z")]
_Version = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+!-]{0,63}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Size = Annotated[int, msgspec.Meta(gt=0, le=MAX_SIZE)]
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}"
_Path = Annotated[str, msgspec.Meta(pattern=rf"^({_PART}/){{1,15}}{_PART}\Z")]


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One cubin: `size` bytes that hash to `sha256`, from `version` of the set (family) `set_name`."""

    name: _Name
    set_name: _Name
    version: _Version
    sha256: _Sha256
    size: _Size
    published: _Path | None = None
    """Relative path of the file in its publisher's own layout; None = nobody else publishes it."""

    @property
    def key(self) -> str:
        """Relative path of the file in every content-addressed store and mirror."""
        return f"{self.sha256[:2]}/{self.sha256}"

    @property
    def paths(self) -> tuple[str, ...]:
        """Relative paths that a folder or mirror may have the file under, in the order to try them."""
        return (self.key,) if self.published is None else (self.key, self.published)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All cubins of a release by name. `source` says in messages where they were read from."""

    artifacts: Mapping[str, Artifact]
    source: str = "the manifest"

    @classmethod
    def from_yaml(cls, text: str | bytes, source: str = "the manifest") -> Manifest:
        """Reads and checks a manifest; any content that is not one raises ManifestError."""
        artifacts: dict[str, Artifact] = {}
        try:
            for artifact in _read_artifacts(strict_yaml.parse(text)):
                if artifact.name in artifacts:
                    raise ManifestError(
                        f"{artifact.name} is in two sets, {artifacts[artifact.name].set_name} and "
                        f"{artifact.set_name}; expected each name once"
                    )
                artifacts[artifact.name] = artifact
        except ValueError as error:
            raise ManifestError(f"{source}: {error}") from None
        return cls(artifacts=artifacts, source=source)

    def find(self, name: str) -> Artifact:
        """The cubin called `name`; raises ArtifactNotFoundError if the manifest does not list it."""
        try:
            return self.artifacts[name]
        except KeyError:
            raise ArtifactNotFoundError(
                f"{self.source} lists no cubin {name!r} among its {len(self.artifacts)}. The kernel tables "
                "and the manifest come from different builds: reinstall cubin-runtime, or in a checkout "
                "run scripts/build_cubins.py"
            ) from None

    def to_yaml(self) -> str:
        """The manifest as text, sorted: the same content always gives the same bytes.

        Raises ManifestError for content that `from_yaml` would refuse.
        """
        lines = [f"format: {FORMAT}", "sets:" if self.artifacts else "sets: {}"]
        ordered = sorted(self.artifacts.values(), key=lambda a: (*_set_of(a), a.name))
        for (set_name, version, path), members in itertools.groupby(ordered, _set_of):
            lines += [f"  {set_name}:", f'    version: "{version}"']
            lines += [f"    path: {path}"] if path else []
            lines += ["    files:", *(f"      {a.name}: {{{_file_of(a)}}}" for a in members)]
        text = "\n".join(lines) + "\n"
        # Reading it back refuses bad values, and two versions of one set as a repeated key.
        if Manifest.from_yaml(text, source="the manifest to be written").artifacts != self.artifacts:
            raise ManifestError("the manifest to be written holds names that YAML reads as something else")
        return text


@functools.cache
def default_manifest() -> Manifest:
    """The package's manifest with those of CUBIN_RUNTIME_MANIFESTS, read once per process."""
    return combined(load_manifest(), *added_manifests(settings))


def load_manifest(path: str | Path | None = None, trusted_keys: Sequence[Path] = ()) -> Manifest:
    """The manifest at `path` (default: the package's own); raises ManifestError if it cannot be used.

    trusted_keys    PEM files of public keys; if there are any, one must have signed it (SignatureError)
    """
    path = package_manifest() if path is None else Path(path)
    content = read_manifest(path)
    if trusted_keys:
        from cubin_runtime.signature import check_signature

        check_signature(content, path, trusted_keys)
    return Manifest.from_yaml(content, source=str(path))


def added_manifests(settings: Settings = settings) -> list[Manifest]:
    """The manifests that CUBIN_RUNTIME_MANIFESTS names, signed if CUBIN_RUNTIME_TRUSTED_KEYS asks for it."""
    return [load_manifest(path, settings.trusted_keys) for path in settings.manifests]


def combined(first: Manifest, *others: Manifest) -> Manifest:
    """One manifest of all; raises ManifestError if two give one name to different bytes."""
    artifacts = dict(first.artifacts)
    for other in others:
        for name, artifact in other.artifacts.items():
            known = artifacts.setdefault(name, artifact)
            if known.sha256 != artifact.sha256:
                raise ManifestError(
                    f"{other.source}: {name} has other contents in {known.set_name} {known.version}; "
                    "expected a name of its own"
                )
    source = ", ".join(manifest.source for manifest in (first, *others))
    return Manifest(artifacts=artifacts, source=source)


def read_manifest(path: Path) -> bytes:
    """The content of a manifest file, of which too large a one is not read whole."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_SIZE + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ManifestError(f"cannot read the manifest {path}: {error}") from error
    if len(content) > MAX_MANIFEST_SIZE:
        raise ManifestError(f"{path} has more than {MAX_MANIFEST_SIZE} bytes, too many for a manifest")
    return content


def package_manifest() -> Path:
    """The package's own: in a wheel it lies inside kernel_meta, in a checkout next to the packages."""
    root = Path(__file__).resolve().parent.parent
    packaged = root / "kernel_meta" / FILE_NAME
    return packaged if packaged.exists() else root / FILE_NAME


def _read_artifacts(document: object) -> Iterator[Artifact]:
    found = document.get("format") if isinstance(document, dict) else None
    if found not in (None, FORMAT):
        raise ManifestError(f"format is {found!r}, and this release reads {FORMAT}; upgrade cubin-runtime")
    _, sets = _fields(document, "the document", "format", "sets")
    for set_name, content in _mapping(sets, "sets").items():
        is_published = isinstance(content, dict) and "path" in content
        extra = ("path", "file") if is_published else ()
        version, files, *path = _fields(content, f"sets.{set_name}", "version", "files", *extra[:1])
        for name, entry in _mapping(files, f"sets.{set_name}.files").items():
            where = f"sets.{set_name}.files.{name}"
            sha256, size, *file = _fields(entry, where, "sha256", "size", *extra[1:])
            values = {"name": name, "set_name": set_name, "version": version, "sha256": sha256, "size": size}
            if is_published:
                values["published"] = "/".join(f"{part or ''}" for part in (*path, *file))
            try:
                yield msgspec.convert(values, Artifact, strict=False)
            except msgspec.ValidationError as error:
                raise ManifestError(f"{where}: {error}; given: {_short(values)}") from None


def _set_of(artifact: Artifact) -> tuple[str, str, str]:
    """Name, version and path of the artifact's set."""
    return artifact.set_name, artifact.version, (artifact.published or "").rpartition("/")[0]


def _file_of(artifact: Artifact) -> str:
    """What a manifest says of one file."""
    fields = f"sha256: {artifact.sha256}, size: {artifact.size}"
    file = (artifact.published or "").rpartition("/")[2]
    return f"{fields}, file: {file}" if file else fields


def _fields(value: Any, where: str, *names: str) -> list[Any]:
    """The values of a mapping that has exactly these names."""
    if set(_mapping(value, where)) != set(names):
        raise ManifestError(f"{where} has {_short(list(value))}; expected {' and '.join(names)}")
    return [value[name] for name in names]


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{where} is {_short(value)}; expected a mapping")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + "..."
