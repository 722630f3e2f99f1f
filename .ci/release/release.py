"""Make a release: wheels, images, chart, bills of materials, checksums and a signature in one folder.

`make release` writes version and changelog, commits and tags; nothing changes if a step fails. `make release-build`
builds a tag that exists. Exit: 0 made, 1 refused or failed, 2 wrong usage.
"""

import argparse
import datetime as dt
import os
import sys
import tempfile
from pathlib import Path

import changelog
import images
import packages
import signatures
import versions
from commands import git
from errors import ReleaseError

ROOT = Path(__file__).parents[2]
SIGNERS = ".ci/release/allowed_signers"


def main() -> int:
    """Run the command line."""
    options = _arguments()
    try:
        Release(options).make()
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("version", help="the version, such as 0.2.0 or 0.2.0-rc.1")
    parser.add_argument("--root", type=Path, default=ROOT, help="the working tree")
    parser.add_argument("--out", type=Path, help="the folder to make (dist/VERSION)")
    parser.add_argument("--tagged", action="store_true", help="build the tag vVERSION, which is checked out")
    parser.add_argument("--key", type=Path, help="the SSH key that signs")
    parser.add_argument("--sign", default="ssh", choices=("ssh", "none"), help="none: the release is not signed")
    parser.add_argument("--images", default=" ".join(images.IMAGES), help=f"none, or some of {' '.join(images.IMAGES)}")
    parser.add_argument("--platforms", default="", help="the platforms of the images, all of which are required")
    parser.add_argument("--base-image", default="", help="the base image, by default that of the Dockerfiles")
    parser.add_argument("--build-options", default="", help="further options of `docker buildx build`")
    return parser.parse_args()


class Release:
    """One release, as the command line describes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._version: str = options.version
        self._tag = f"v{self._version}"
        self._root: Path = options.root.resolve()
        self._folder: Path = (options.out or self._root / "dist" / self._version).resolve()
        self._images = [name for name in options.images.replace(",", " ").split() if name != "none"]
        self._builder: images.Builder | None = None
        self._base = ""

    def make(self) -> None:
        """Check everything, then build. Raises ReleaseError, and leaves repository and folder as they were."""
        self._check()
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".release-", dir=self._folder.parent) as temporary:
            tree, built = Path(temporary, "tree"), Path(temporary, "built")
            git(self._root, "worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
            try:
                if not self._options.tagged:
                    self._commit(tree)
                self._build(tree, built)
                if not self._options.tagged:
                    self._publish(git(tree, "rev-parse", "HEAD"))
                built.rename(self._folder)
            finally:
                git(self._root, "worktree", "remove", "--force", str(tree))
        print(self._folder)
        if not self._options.tagged:
            print(f"The commit and the tag {self._tag} are local: git push origin HEAD {self._tag}", file=sys.stderr)

    def _check(self) -> None:
        versions.parse(self._version)
        if changed := git(self._root, "status", "--porcelain"):
            raise ReleaseError(
                f"the working tree has changes that a release would not contain; commit them first:\n{changed}"
            )
        if self._folder.exists():
            raise ReleaseError(f"{self._folder} exists already: remove it, or set OUT to another folder")
        is_there = bool(git(self._root, "tag", "--list", self._tag))
        before = versions.current(self._root)
        text = (self._root / "CHANGELOG.md").read_text()
        if self._options.tagged:
            if self._tag not in git(self._root, "tag", "--points-at", "HEAD").splitlines():
                raise ReleaseError(f"the tag {self._tag} is not checked out: git checkout {self._tag}")
            if before != self._version:
                raise ReleaseError(f"the files have the version {before}, and the tag is {self._tag}")
            changelog.section(text, self._version)
        elif is_there:
            raise ReleaseError(
                f"the tag {self._tag} exists already: a version is released once, so choose the next one"
            )
        else:
            versions.check_is_newer(self._version, before)
            changelog.unreleased(text)
        self._check_tools()

    def _check_tools(self) -> None:
        if unknown := set(self._images) - set(images.IMAGES):
            raise ReleaseError(
                f"IMAGES has {', '.join(sorted(unknown))}: choose from {', '.join(images.IMAGES)}, or none"
            )
        if self._options.sign == "none":
            print("SIGN=none: this release is not signed, so no one can check who made it.", file=sys.stderr)
        elif self._options.key is None:
            raise ReleaseError(
                "a release is signed: set KEY to your SSH key, such as KEY=~/.ssh/id_ed25519. For a trial without a "
                "signature set SIGN=none"
            )
        else:
            signatures.check_key(self._options.key.expanduser(), self._root / SIGNERS)
        if not self._images:
            print("IMAGES=none: this release has no images.", file=sys.stderr)
            return
        try:
            self._builder = images.find_builder(tuple(self._options.platforms.replace(",", " ").split()))
            self._base = images.base_image(self._root, self._options.base_image)
        except ReleaseError as error:
            raise ReleaseError(f"{error}\nFor a release without images set IMAGES=none") from None

    def _commit(self, tree: Path) -> None:
        versions.write(tree, self._version)
        versions.current(tree)
        file = tree / "CHANGELOG.md"
        file.write_text(changelog.released(file.read_text(), self._version, dt.datetime.now(dt.UTC).date()))
        git(tree, "commit", "--quiet", "--all", "--message", f"Release {self._version}")

    def _build(self, tree: Path, folder: Path) -> None:
        epoch = int(git(tree, "log", "-1", "--format=%ct"))
        folder.mkdir()
        packages.build_wheels(tree, folder, epoch)
        packages.build_chart(tree, folder, epoch)
        (folder / "CHANGES.md").write_text(changelog.section((tree / "CHANGELOG.md").read_text(), self._version))
        if self._builder is not None:
            self._build_images(tree, folder, self._builder)
        signatures.write_checksums(folder)
        if self._options.sign != "none":
            signature = signatures.sign(folder / signatures.CHECKSUMS, self._options.key.expanduser())
            signatures.verify(folder / signatures.CHECKSUMS, signature, self._root / SIGNERS)

    def _build_images(self, tree: Path, folder: Path, builder: images.Builder) -> None:
        lines = []
        for name in self._images:
            image = images.IMAGES[name]
            stem = image.reference(self._version).replace(":", "-")
            archive = folder / f"{stem}.oci.tar"
            images.build(image, tree, self._version, builder, self._base, self._options.build_options, archive)
            if not archive.exists():
                continue
            for platform, bill in images.bills_of_materials(archive):
                (folder / f"{stem}-{platform}.cdx.json").write_bytes(bill)
            lines.append(f"{image.reference(self._version)} {images.digest(archive)} {archive.name}\n")
        (folder / "images.txt").write_text("".join(lines))
        (folder / "base-image.txt").write_text(f"{self._base}\n")

    def _publish(self, commit: str) -> None:
        """Move the branch to the release's commit and tag it. This fails if the branch has moved meanwhile."""
        git(self._root, "merge", "--quiet", "--ff-only", commit)
        git(self._root, "tag", "--annotate", "--message", f"fedssl {self._version}", self._tag, commit)


if __name__ == "__main__":
    os.umask(0o022)  # the modes of files are part of a wheel
    sys.exit(main())
