"""All pages in one router; none of them is in the OpenAPI document."""

from fastapi import APIRouter

from fedssl_coordinator.dashboard import lists as list_pages
from fedssl_coordinator.dashboard import login, provider_login
from fedssl_coordinator.dashboard.clients import pages as client_pages
from fedssl_coordinator.dashboard.compare import pages as compare_pages
from fedssl_coordinator.dashboard.new_run import pages as new_run_pages
from fedssl_coordinator.dashboard.notifications import pages as notification_pages
from fedssl_coordinator.dashboard.reference import pages as reference_pages
from fedssl_coordinator.dashboard.run import files as run_files
from fedssl_coordinator.dashboard.run import forms as run_forms
from fedssl_coordinator.dashboard.run import pages as run_pages
from fedssl_coordinator.dashboard.run import tables as run_tables
from fedssl_coordinator.dashboard.runs import pages as runs_pages

router = APIRouter(include_in_schema=False)
# The first that fits is taken: `/runs/new` comes before `/runs/{run_id}`.
PAGES = (
    login,
    provider_login,
    runs_pages,
    new_run_pages,
    compare_pages,
    run_tables,
    run_files,
    run_forms,
    run_pages,
    client_pages,
    list_pages,
    notification_pages,
    reference_pages,
)
for pages in PAGES:
    router.routes.extend(pages.router.routes)
