"""The launcher `local`: processes of this machine."""
