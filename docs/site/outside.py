"""Links from a page to a file of the tree outside of docs/.

A site has no such page, so the path of the file stands for the link. Images are copied into the site. `scripts/check-links`
checks that the files are there.
"""

import glob
import os
import re

from mkdocs.structure.files import File

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def on_files(files, config, **_):
    for path in glob.glob("bench/**/*.svg", root_dir=TOP, recursive=True):
        files.append(File.generated(config, f"outside/{path}", abs_src_path=os.path.join(TOP, path)))
    return files


def on_page_markdown(markdown, page, config, **_):
    here = os.path.dirname(page.file.src_uri)

    def replaced(match):
        image, text, target = match.groups()
        path = os.path.normpath(os.path.join(here, target.split("#")[0]))
        if not path.startswith("../"):
            return match.group(0)
        if image:
            return f"![{text}]({os.path.relpath('outside/' + path[3:], here or '.')})"
        return f"{text} (`{path[3:]}`)"

    return re.sub(r"(!?)\[([^\]]+)\]\((\.\.?/[^)\s]+)\)", replaced, markdown)
