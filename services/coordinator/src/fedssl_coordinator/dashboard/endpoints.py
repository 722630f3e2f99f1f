"""All pages in one router; none is part of the REST API's document."""

from fastapi import APIRouter

from fedssl_coordinator.dashboard import (
    client_pages,
    compare_pages,
    new_run_pages,
    other_pages,
    reference_pages,
    run_pages,
    run_tables,
    runs_pages,
    signing,
)

router = APIRouter(include_in_schema=False)
# The first that fits is taken: `/runs/new` comes before `/runs/{run_id}`.
_PAGES = (signing, runs_pages, new_run_pages, compare_pages, run_tables, run_pages, client_pages, other_pages)
for pages in (*_PAGES, reference_pages):
    router.include_router(pages.router)
