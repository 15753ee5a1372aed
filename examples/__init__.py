"""Programs to copy from, one file each; `studies` is a package of trainers."""
