"""Every error that fedssl raises on purpose. A class's docstring says what happened; the message what to do.

FedSSLError
├── SpecError            a run spec that cannot be read or makes no sense
├── DataError            images that cannot be found or read
├── ArtifactError        an artifact that is not what was declared
│   ├── PlanMismatch     names, shapes or dtypes differ from the plan
│   ├── DigestMismatch   the bytes are not those of the digest
│   ├── NotFinite        NaN or infinity in a tensor
│   ├── ArtifactTooLarge more bytes than the plan allows
│   └── ArtifactNotFound nothing is stored under a digest
├── Cancelled            the work was called off from outside
└── MethodError          a method cannot do what was asked of it
"""


class FedSSLError(Exception):
    """Something went wrong that a person can do something about."""


class SpecError(FedSSLError):
    """The run spec cannot be read or makes no sense."""


class DataError(FedSSLError):
    """The images cannot be found or read."""


class ArtifactError(FedSSLError):
    """An artifact is not what was declared."""


class PlanMismatch(ArtifactError):
    """Names, shapes or dtypes differ from the plan."""


class DigestMismatch(ArtifactError):
    """The bytes are not those of the digest."""


class NotFinite(ArtifactError):
    """A tensor holds NaN or infinity."""


class ArtifactTooLarge(ArtifactError):
    """The artifact has more bytes than its plan allows."""


class ArtifactNotFound(ArtifactError):
    """Nothing is stored under this digest."""


class Cancelled(FedSSLError):
    """The work was called off from outside."""


class MethodError(FedSSLError):
    """The method cannot do what was asked of it."""
