"""A backend for vLLM, whose paged KV cache then holds packed tokens. See docs/vllm.md.

``plugin.py`` is what vLLM loads, ``backend.py`` speaks to vLLM, ``pages.py`` knows nothing of it. Importing this
package imports none of them.
"""
