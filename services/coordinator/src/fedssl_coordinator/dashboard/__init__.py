"""The web page: the same services as the REST API, as HTML for people. docs/web.md lists what it promises."""
