"""What a model that was trained here rests on, as BibTeX."""

PROJECT = "rl-sa2va"
ENTRIES = {
    "rl_sa2va": """@software{rl_sa2va,
  title = {rl-sa2va: Reinforcement learning of Sa2VA by closed mask-caption cycles},
  version = {0.1.0}
}
""",
    "sa2va": """@article{yuan2025sa2va,
  title = {{Sa2VA}: Marrying {SAM2} with {LLaVA} for Dense Grounded Understanding of Images and
           Videos},
  author = {Yuan, Haobo and Li, Xiangtai and Zhang, Tao and Huang, Zilong and Xu, Shilin and
            Ji, Shunping and Tong, Yunhai and Qi, Lu and Feng, Jiashi and Yang, Ming-Hsuan},
  journal = {arXiv preprint arXiv:2501.04001},
  year = {2025}
}
""",
    "sam2": """@article{ravi2024sam2,
  title = {{SAM} 2: Segment Anything in Images and Videos},
  author = {Ravi, Nikhila and Gabeur, Valentin and Hu, Yuan-Ting and Hu, Ronghang and others},
  journal = {arXiv preprint arXiv:2408.00714},
  year = {2024}
}
""",
    "internvl": """@article{chen2024internvl25,
  title = {Expanding Performance Boundaries of Open-Source Multimodal Models with Model, Data, and
           Test-Time Scaling},
  author = {Chen, Zhe and others},
  journal = {arXiv preprint arXiv:2412.05271},
  year = {2024}
}
""",
    "qwen": """@article{qwen2024qwen25,
  title = {{Qwen2.5} Technical Report},
  author = {Yang, An and others},
  journal = {arXiv preprint arXiv:2412.15115},
  year = {2024}
}
""",
    "qwen_vl": """@article{bai2025qwen25vl,
  title = {{Qwen2.5-VL} Technical Report},
  author = {Bai, Shuai and others},
  journal = {arXiv preprint arXiv:2502.13923},
  year = {2025}
}
""",
    "grpo": """@article{shao2024deepseekmath,
  title = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models},
  author = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and others},
  journal = {arXiv preprint arXiv:2402.03300},
  year = {2024}
}
""",
}
OF_FAMILY = {
    "sa2va": ("rl_sa2va", "sa2va", "sam2", "internvl", "qwen", "grpo"),
    "qwen2_5_vl": ("rl_sa2va", "qwen_vl", "sam2", "grpo"),
}


def bibtex(family: str, reinforced: bool = True) -> str:
    """The entries of what a model of a family was made of and trained by."""
    names = [name for name in OF_FAMILY[family] if reinforced or name != "grpo"]
    return "\n".join(ENTRIES[name] for name in names)
