"""Canaille, an OpenID Connect provider, over SQLite: `python openid_server.py DATABASE PORT REDIRECT_URI BACK`.

The coordinator is its only client.
"""

import datetime
import secrets
import sys
import threading
import time

CLIENT_ID, CLIENT_SECRET = "fedssl", "the-secret-of_the~coordinator.1"
PEOPLE = {
    "ada": ["ml-team", "readers"],
    "grace": ["readers"],
    "linus": ["readers"],
    "mallory": ["cooks"],
    "root": ["chiefs"],
    "eve": [],
}


def password_of(name: str) -> str:
    """Return the password of one of the people."""
    return f"{name}'s long password"


def main() -> None:
    """Serve until the process is ended."""
    from canaille import create_app
    from canaille.app import models
    from canaille.backends import Backend
    from flask import request
    from werkzeug.serving import make_server

    database, port, redirect_uri, back = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    app = create_app(
        {
            "SECRET_KEY": secrets.token_hex(),
            "SERVER_NAME": f"127.0.0.1:{port}",
            "PREFERRED_URL_SCHEME": "http",
            "CANAILLE_SQL": {
                "DATABASE_URI": f"sqlite:///{database}",
                "PASSWORD_HASH_PARAMS": {"pbkdf2_sha512__rounds": 1000},
            },
            "CANAILLE": {"DATABASE": "sql", "CAPTCHA_ENABLED": False, "HTMX": False, "JAVASCRIPT": False},
            # People have to consent, as they do when another organisation runs the provider.
            "CANAILLE_OIDC": {"TRUSTED_DOMAINS": ["nobody.invalid"]},
        },
        init_backend=True,
    )
    one_at_a_time = threading.Lock()

    @app.before_request
    def tokens_are_issued_in_different_seconds() -> None:
        """Wait for the next second before each token.

        Canaille would give a person equal tokens within one second, and answers 500 because they have to be unique.
        """
        if request.path == "/oauth/token":
            with one_at_a_time:
                time.sleep(1.01 - time.time() % 1)

    with app.app_context(), Backend.instance.session():
        backend = Backend.instance
        people = {}
        for name in PEOPLE:
            people[name] = models.User(
                user_name=name,
                formatted_name=name.title(),
                family_name=name.title(),
                display_name=name,
                emails=[f"{name}@example.org"],
                password=password_of(name),
            )
            backend.save(people[name])
        for group in sorted({group for groups in PEOPLE.values() for group in groups}):
            members = [people[name] for name, groups in PEOPLE.items() if group in groups]
            backend.save(models.Group(display_name=group, members=members))
        client = models.Client(
            client_id=CLIENT_ID,
            client_secret=CLIENT_SECRET,
            client_id_issued_at=datetime.datetime.now(datetime.UTC),
            client_name="fedssl",
            client_uri="https://fedssl.example.org",
            redirect_uris=[redirect_uri],
            post_logout_redirect_uris=[back],
            grant_types=["authorization_code"],
            response_types=["code"],
            scope=["openid", "profile", "email", "groups"],
            token_endpoint_auth_method="client_secret_basic",
            id_token_signed_response_alg="RS256",
        )
        backend.save(client)
        client.audience = [client]
        backend.save(client)
    make_server("127.0.0.1", port, app, threaded=True).serve_forever()


if __name__ == "__main__":
    main()
