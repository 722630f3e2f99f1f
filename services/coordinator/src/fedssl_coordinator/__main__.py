"""`python -m fedssl_coordinator`"""

from fedssl_coordinator.main import app

app()
