"""All pages in one router; none is part of the REST API's document."""

from fastapi import APIRouter

from fedssl_coordinator.dashboard import run_pages, runs_pages, signing

router = APIRouter(include_in_schema=False)
for pages in (signing, runs_pages, run_pages):
    router.include_router(pages.router)
