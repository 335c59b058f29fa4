"""A file for ms-swift's ``--external_plugins``: what ms-swift imports in every process that it replays plug-ins in."""

from ullage.engines.frameworks import install

install("swift")
