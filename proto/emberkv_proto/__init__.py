"""The contract of EmberKV: value types, identity, events, errors, wire format, pool layout."""

__version__ = "0.1.0"
