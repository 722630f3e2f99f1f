"""The base of all answers of the API."""

from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class View(BaseModel):
    """The base of all answers. Unknown keys are ignored, so that an older client can read a newer coordinator."""

    model_config = ConfigDict(frozen=True)


class Page(View, Generic[T]):
    """One page of a list. Pass `next_cursor` as `cursor` to get the next page; it is null on the last page."""

    items: Annotated[list[T], Field(fail_fast=True)]
    next_cursor: str | None = None
