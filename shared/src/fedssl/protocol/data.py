"""The images of a run, and how views are made of them."""

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, ValidationInfo, field_validator, model_validator

from fedssl.protocol.base import Digest, StrictModel
from fedssl.wording import plural

KNOWN_DATASETS = (
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "svhn",
    "tiny-imagenet",
    "mini-imagenet",
    "imagenet-100",
    "digits",
)
"""The names in `fedssl.data.DATASETS`: every machine finds them by name. Other names are paths, or were registered."""

Scheme = Literal["iid", "classes", "dirichlet", "file"]
Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=1)]
Percentile = Annotated[float, Field(ge=0, le=100)]
Channels = Annotated[int, Field(ge=1, le=16)]
ShareLost = Annotated[float, Field(ge=0, lt=1)]
MAX_UNREADABLE = 0.01
"""The share of a folder's images that may be unreadable, unless a spec or a worker's owner sets another."""


AUGMENTATION_PRESETS: dict[str, dict[str, Any]] = {
    "natural": {},
    "radiograph": {
        "min_scale": 0.3,
        "rotation_degrees": 10.0,
        "padding_mode": "reflect",
        "jitter": 0.8,
        "brightness": 0.2,
        "contrast": 0.3,
        "saturation": 0.0,
        "hue": 0.0,
        "greyscale": 0.0,
    },
    "microscopy": {
        "flip_vertical": 0.5,
        "right_angles": 1.0,
        "stain": 0.2,
        "brightness": 0.2,
        "contrast": 0.2,
        "saturation": 0.0,
        "hue": 0.0,
        "greyscale": 0.0,
    },
    "none": {"crop": "none", "flip": 0.0, "jitter": 0.0, "greyscale": 0.0},
}
"""The keys that each preset sets; all others keep their defaults. `natural` is the default itself."""


class AugmentationConfig(StrictModel):
    """Random views, batched on the device; every sample draws its own parameters.

    Order: crop, flips, rotation, stain, colour (brightness, contrast, saturation, hue), greyscale, blur, solarize.
    Operations that need three channels (stain, saturation, hue, greyscale) do nothing to images of any other number.
    """

    preset: Literal["natural", "radiograph", "microscopy", "none"] | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="Sets the keys for a kind of images. Keys that are given take precedence. "
        "`natural`: the defaults. `radiograph`: no flips up-down, mild rotation, brightness and contrast, no colours. "
        "`microscopy`: all flips and right angles, stain, brightness and contrast. `none`: the images as they are.",
    )

    crop: Literal["resized", "padded", "none"] = Field(
        default="resized",
        description="`resized`: random area and aspect, resized back; `padded`: shift by up to `padding` pixels.",
    )
    min_scale: float = Field(default=0.2, gt=0, le=1, description="Smallest area of a resized crop, as a share.")
    max_scale: float = Field(default=1.0, gt=0, le=1)
    padding: int = Field(default=4, ge=0, le=64)
    padding_mode: Literal["zeros", "reflect"] = "zeros"
    flip: Probability = 0.5
    jitter: Probability = Field(default=0.8, description="Probability that a sample's colours are jittered.")
    brightness: Strength = 0.4
    contrast: Strength = 0.4
    saturation: Strength = 0.4
    hue: float = Field(default=0.1, ge=0, le=0.5)
    greyscale: Probability = 0.2
    blur: Probability = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: Probability = 0.0
    rotation_degrees: float = Field(default=0.0, ge=0, le=180)
    flip_vertical: Probability = Field(
        default=0.0, exclude_if=lambda it: it == 0, description="Probability of a flip up-down."
    )
    right_angles: Probability = Field(
        default=0.0,
        exclude_if=lambda it: it == 0,
        description="Probability of a turn by 0, 90, 180 or 270 degrees, each equally likely.",
    )
    stain: Strength = Field(
        default=0.0,
        exclude_if=lambda it: it == 0,
        description="For RGB images of stained tissue: by how much the amount of each stain (haematoxylin, eosin, DAB) "
        "varies, as a share.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or (preset := values.get("preset")) not in AUGMENTATION_PRESETS:
            return values  # the field itself reports an unknown preset
        # The preset itself is not kept: keys with the value 0 are not in a dump, and must not get the preset's value
        # when it is read.
        return {**AUGMENTATION_PRESETS[preset], **{key: value for key, value in values.items() if key != "preset"}}

    @model_validator(mode="after")
    def _ordered(self) -> "AugmentationConfig":
        if self.min_scale > self.max_scale:
            raise ValueError("augmentation.min_scale must not exceed augmentation.max_scale")
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError("augmentation.blur_sigma must be two positive numbers, the smaller first")
        return self


class LocalCropsConfig(StrictModel):
    """Multi-crop: further views of each image, which are smaller and show less of it (SwAV, DINO)."""

    num_crops: int = Field(default=8, ge=1, le=32, description="Number of local crops of each image (DINO: 8).")
    image_size: int = Field(ge=4, le=512, description="Their height and width in pixels (DINO: 96 of 224).")
    min_scale: float = Field(default=0.05, gt=0, le=1, description="Their smallest area, as a share (DINO: 0.05).")
    max_scale: float = Field(
        default=0.4,
        gt=0,
        le=1,
        description="Their largest area (DINO: 0.4). The smallest of the other views is data.augmentation.min_scale.",
    )
    blur: Probability | None = Field(
        default=None, description="Probability that they are blurred (DINO: 0.5). Null: that of data.augmentation."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "LocalCropsConfig":
        if self.min_scale > self.max_scale:
            raise ValueError("local_crops.min_scale must not exceed local_crops.max_scale")
        return self

    @property
    def changes(self) -> dict[str, float]:
        """The keys of the augmentation that differ for local crops."""
        scales = {"min_scale": self.min_scale, "max_scale": self.max_scale}
        return scales if self.blur is None else {**scales, "blur": self.blur}


class WindowConfig(StrictModel):
    """Which values of an image file become black and white. Values outside of them are clipped.

    One of `percentiles`, `values`, `center` with `width`, `stored`, or `voi` is set.
    """

    percentiles: tuple[Percentile, Percentile] | None = Field(
        default=None, description="These percentiles of each image's own values become black and white."
    )
    values: tuple[FiniteFloat, FiniteFloat] | None = Field(
        default=None, description="The values that become black and white, the same for all images."
    )
    center: FiniteFloat | None = Field(
        default=None, description="With `width`: the linear window of DICOM PS3.3 C.11.2.1.2.1."
    )
    width: FiniteFloat | None = Field(default=None, ge=1)
    stored: bool = Field(
        default=False,
        description="The whole range that each file declares: 0..4,095 for 12 bits, 0..65,535 for 16.",
    )
    voi: bool = Field(
        default=False,
        exclude_if=lambda it: not it,
        description="The VOI LUT, or else the window, of each DICOM file itself. Files without one are unreadable.",
    )
    per_channel: bool = Field(
        default=False, description="Percentiles of each channel by itself: for channels that are not RGB."
    )
    bits: Literal[8, 16] = Field(
        default=16, description="Precision of the prepared pixels. 16 bits take twice the memory of 8."
    )

    @model_validator(mode="after")
    def _is_one_window(self) -> "WindowConfig":
        if (self.center is None) != (self.width is None):
            raise ValueError("data.window.center and data.window.width belong together: set both")
        chosen = (self.percentiles is not None, self.values is not None, self.center is not None, self.stored, self.voi)
        if sum(chosen) != 1:
            raise ValueError(
                "data.window needs one of percentiles, values, center with width, stored = true, or voi = true"
            )
        for name in ("percentiles", "values"):
            if (pair := getattr(self, name)) is not None and pair[0] >= pair[1]:
                raise ValueError(f"data.window.{name} must be two numbers, the smaller first; got {list(pair)}")
        if self.per_channel and self.percentiles is None:
            raise ValueError("data.window.per_channel is for percentiles: set them, or leave it out")
        return self

    @property
    def limits(self) -> tuple[float, float] | None:
        """The values that become black and white, or None if each image decides about them."""
        if self.center is not None and self.width is not None:
            half = (self.width - 1) / 2
            return self.center - 0.5 - half, self.center - 0.5 + half
        return self.values

    def refusal_of_8_bits(self) -> str | None:
        """Return why images of 8 bits cannot be used, or None if they can.

        They cannot if the window has values that they do not hold: they would all be nearly black, or grey.
        """
        if self.voi:
            return (
                "the window of the spec is the one that each DICOM file declares (data.window.voi), and these images "
                "have none: use DICOM files, or data.window.percentiles"
            )
        if self.limits is None or (self.limits[0] >= 0 and self.limits[1] <= 255):
            return None
        low, high = self.limits
        return (
            f"the window of the spec is from {low:,g} to {high:,g}, but values of 8 bits are 0 to 255: use files of "
            "more bits, or data.window.percentiles"
        )


class DataConfig(StrictModel):
    """The shape and preparation of the images, the same at every client."""

    channels: Channels = 3
    image_size: int = Field(default=32, ge=8, le=512, description="Height and width in pixels.")
    mean: tuple[float, ...] | None = Field(
        default=None, description="Mean per channel of pixels in 0..1. Null means 0."
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        default=None, description="Standard deviation per channel. Null means 1."
    )
    augmentation: AugmentationConfig = AugmentationConfig()
    second_view: AugmentationConfig | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="The augmentation of the second view of each image, such as BYOL's with less blur and with "
        "solarisation. Keys that are left out have their defaults, not those of `augmentation`. Null: both views have "
        "`augmentation`.",
    )
    local_crops: LocalCropsConfig | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="Multi-crop: smaller crops besides the two views. Null: there are none.",
    )
    window: WindowConfig | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="For images of more than 8 bits: the values that become black and white. Null: images of 8 bits as "
        "they are, and the upper 8 bits of 16.",
    )
    max_unreadable: ShareLost = Field(
        default=MAX_UNREADABLE,
        exclude_if=lambda it: it == MAX_UNREADABLE,
        description="Share of the image files in a folder that may be unreadable: they are left out, and named in the "
        "log. With more, nothing is trained.",
    )

    cache_size: int | None = Field(
        default=None,
        ge=8,
        le=1024,
        exclude_if=lambda it: it is None,
        description="Decode the image files of a folder once, to this many pixels on the shorter side with their "
        "aspect kept, and cut random crops out of these images. From `image_size` to twice of it. Null: crops are cut "
        "out of squares of `image_size` pixels, which are kept in memory.",
    )
    distinct_groups: bool = Field(
        default=False,
        exclude_if=lambda it: not it,
        description="No batch has two images of one group (a patient, a video, a slide). Clients whose images have no "
        "groups decline.",
    )

    @model_validator(mode="after")
    def _local_crops_are_smaller(self) -> "DataConfig":
        if (crops := self.local_crops) is None:
            return self
        if crops.image_size > self.image_size:
            raise ValueError(
                f"data.local_crops.image_size is {crops.image_size}, larger than the images (data.image_size "
                f"{self.image_size}): lower it"
            )
        if self.augmentation.crop != "resized":
            raise ValueError('data.local_crops are resized crops: set data.augmentation.crop to "resized"')
        return self

    @model_validator(mode="after")
    def _cache_fits_crops(self) -> "DataConfig":
        if self.cache_size is not None and not self.image_size <= self.cache_size <= 2 * self.image_size:
            raise ValueError(
                f"data.cache_size must be from {self.image_size} to {2 * self.image_size}, one to two times "
                f"data.image_size, because crops are sampled from it without a filter; got {self.cache_size}"
            )
        return self

    @model_validator(mode="after")
    def _one_value_a_channel(self) -> "DataConfig":
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.channels:
                needed = plural(self.channels, "value")
                raise ValueError(f"data.{name} needs {needed}, one per channel; got {len(values)}")
        return self


class ServedShapes(StrictModel):
    """The shapes in which a worker can prepare its images for a run.

    Grey and RGB images are converted to each other. Images with another number of channels serve only that number.
    """

    max_image_size: int = Field(default=512, ge=8, le=512, description="Largest height and width in pixels.")
    max_channels: Channels = Field(
        default=3,
        description="1: only grey; 3: grey or RGB; another number: only images with that number.",
    )

    def __str__(self) -> str:
        return f"{self._channels}, up to {self.max_image_size} pixels"

    @property
    def _channels(self) -> str:
        return "1 or 3 channels" if self.max_channels == 3 else channels_in_words(self.max_channels)

    def refusal(self, data: DataConfig) -> str | None:
        """Return why images cannot be prepared for a run, or None if they can."""
        wanted = shape_in_words(data.channels, data.image_size)
        if data.image_size > self.max_image_size:
            return (
                f"the run needs images of {wanted}, but this client serves at most {self.max_image_size} pixels: lower "
                f"data.image_size, or start the worker with --image-size {data.image_size}"
            )
        if (self.max_channels, data.channels) == (1, 3):
            return (
                f"the run needs images of {wanted}, but this client serves only 1 channel: set data.channels to 1, or "
                "start the worker with --channels 3"
            )
        if data.channels not in ((1, 3) if self.max_channels == 3 else (self.max_channels,)):
            return (
                f"the run needs images of {wanted}, but this client serves {self._channels}: change data.channels, or "
                "leave this client out"
            )
        return None


def fixed_shape_refusal(channels: int, image_size: int, data: DataConfig) -> str | None:
    """Return why a worker whose images have one fixed shape cannot take part in a run, or None if it can."""
    if (channels, image_size) == (data.channels, data.image_size):
        return None
    return (
        f"the run needs images of {shape_in_words(data.channels, data.image_size)}, but this client's have "
        f"{shape_in_words(channels, image_size)}, and its worker serves no other shape: update the worker, or change "
        "the run's data.channels and data.image_size"
    )


def shape_in_words(channels: int, size: int) -> str:
    """Return a shape for people.

    >>> shape_in_words(3, 32)
    '3 channels and 32 x 32 pixels'
    """
    return f"{channels_in_words(channels)} and {size} x {size} pixels"


def channels_in_words(channels: int) -> str:
    """Return a number of channels for a message.

    >>> channels_in_words(1), channels_in_words(5)
    ('1 channel', '5 channels')
    """
    return plural(channels, "channel")


class PartitionConfig(StrictModel):
    """How `fedssl simulate` and `fedssl up` partition a data set among clients. Deployed coordinators read only its
    number of clients, and only for SCAFFOLD without `cohort.clients`."""

    dataset: str = Field(default="fashion-mnist", description="A data set's name, an image folder or an .npz file.")
    num_clients: int = Field(default=4, ge=1, le=10_000)
    scheme: Scheme = "dirichlet"
    alpha: float | None = Field(default=0.1, gt=0, description="Concentration of the Dirichlet distribution.")
    variant: Literal["fedx", "ssd", "flesd", "orchestra"] = Field(
        default="fedx",
        description="Whose Dirichlet partition: `fedx` (FedX, FedU, FedEMA) caps clients and leaves none short, `ssd` "
        "(SSD, FedU2) does neither, `flesd` gives every client a minimum share, `orchestra` equal sizes.",
    )
    pooled: bool = Field(
        default=False,
        description="The centralised baseline: all images at one client, `client-0`, and no partition. R rounds of E "
        "epochs are then R * E epochs of central training, but the optimiser and its momentum restart every round, and "
        "a cosine schedule advances per round. Use num_rounds 1 and local_epochs R * E to avoid both.",
    )
    max_images: int | None = Field(
        default=None, ge=1, description="Partition this many training images, drawn by the seed."
    )
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of its images that each client keeps after the partition (FedX Table 3a).",
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    file: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        validate_default=True,
        exclude_if=lambda it: it is None,
        description="For scheme `file`: a JSON file with a list of image indices per client, `[[0, 7], [3]]`, or with "
        'the clients\' names, `{"site-a": [0, 7], "site-b": [3]}`. Indices count the training images from 0.',
    )

    hold_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        exclude_if=lambda it: it == 0,
        description="Share of each class's training images that no client gets, drawn by the seed before anything "
        "else: those with labels in FedU's and FedRLC's semi-supervised tables.",
    )

    @field_validator("hold_out")
    @classmethod
    def _file_names_all_images(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("scheme") == "file" and not info.data.get("pooled"):
            raise ValueError("partition.file names the images that clients have: leave out partition.hold_out")
        return value

    @field_validator("file")
    @classmethod
    def _file_is_only_for_its_scheme(cls, value: str | None, info: ValidationInfo) -> str | None:
        scheme = info.data.get("scheme")  # missing if it is not valid, which is reported separately
        if scheme == "file" and value is None:
            raise ValueError('partition.scheme = "file" needs partition.file, a JSON file of image indices per client')
        if scheme is not None and scheme != "file" and value is not None:
            raise ValueError(f'partition.file is not used by the scheme {scheme}: set partition.scheme = "file"')
        if value is not None and info.data.get("max_images") is not None and not info.data.get("pooled"):
            raise ValueError("partition.file names images of the whole training split: leave out partition.max_images")
        return value


class PublicDataConfig(StrictModel):
    """Images that the coordinator and all clients have, in the same order.

    With a `digest`, they are registered with the coordinator under this name, and workers download them from it.
    Without one, each machine finds them by name: a data set with fixed files, or copies of one .npz file. In both cases
    the seed draws `num_images` of the whole set, so the result is the same.
    """

    dataset: str = Field(
        min_length=1, max_length=1000, description="A data set's name, an image folder or an .npz file."
    )
    split: Literal["train", "test"] = "train"
    num_images: int = Field(
        default=10_000, ge=2, le=10_000_000, description="Use this many of the split's images, drawn by the seed."
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    digest: Digest | None = Field(
        default=None,
        description="Digest of the registered images' file. The coordinator sets it when the run is created.",
    )
