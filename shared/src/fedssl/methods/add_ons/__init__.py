"""Loss terms and corrections that go onto any objective they are defined for, one per file."""
