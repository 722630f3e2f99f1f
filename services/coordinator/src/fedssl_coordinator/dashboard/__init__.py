"""The web page: the same services as the REST API, as HTML for people. docs/web.md says what it promises."""
