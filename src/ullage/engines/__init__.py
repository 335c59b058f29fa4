"""Adapters to other training frameworks: their function names and signatures over ullage's plans and steps.

None is imported by ``import ullage``, so that no framework has to be installed.
"""
