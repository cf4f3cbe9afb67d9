"""The library the commands in tools/ share; each module has one duty and imports fast."""

import sys

from speedrun.base.venv import enter_venv, install_command

LEAST_PYTHON = (3, 11)
if sys.version_info < LEAST_PYTHON:  # before what an older one cannot import
    enter_venv(is_old=True)
    sys.exit("error: this is Python {}.{}; 3.11 or newer is needed: {}".format(
        *sys.version_info[:2], install_command()))
