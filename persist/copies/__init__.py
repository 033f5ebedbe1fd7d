"""Backup, restore, recovery, repair and verification."""
