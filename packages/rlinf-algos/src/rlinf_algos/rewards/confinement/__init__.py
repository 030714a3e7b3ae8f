"""How `sandbox_entry.py` confines a program: namespaces, another user, Landlock, a filter of system calls, limits.

Runs without site-packages, and possibly as root, so nothing here imports anything but the standard library.
"""
